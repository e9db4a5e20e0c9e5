"""Rows of tens of thousands of tokens train, on one rank and cut over two."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.models import tiny_model
from tests.trainer import ranks
from tests.trainer.ranks import distance, weights_in
from trainer.process_group import ALONE

NUM_TOKENS = 32_768


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_row_of_32768_tokens_trains_on_one_rank_and_on_two_that_share_it(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = NUM_TOKENS
    (model / "config.json").write_text(json.dumps(config))
    job = {
        "model": str(model),
        "last": 1,
        "groups": [1, 2],
        "lengths": [NUM_TOKENS, 300],
        "max_tokens": NUM_TOKENS,
    }
    alone = ranks.do({**job, "folder": str(tmp_path / "1"), "settings": {}}, ALONE)
    shared = ranks.run(
        2, [{**job, "folder": str(tmp_path / "2"), "settings": {"sequence_parallel": 2}}]
    )[0]
    assert alone["steps"][0]["skipped"] is None
    assert alone["steps"][0]["metrics"]["tokens/computed"] == NUM_TOKENS + 300
    expected = weights_in(tmp_path / "1" / "model")
    assert distance(expected, weights_in(tmp_path / "2" / "model")) < 1e-4
    assert distance(weights_in(model), expected) > 1e-4
    assert np.isfinite(shared[0]["steps"][0]["metrics"]["loss"])
