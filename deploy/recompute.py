"""Log-probs of tokens by the version that wrote them, where a log has none.

    version ─▶ its checkpoint on the chain ─▶ `headwater export`, a process of its own ─▶ the model
               the initial model, for version 0.0 ───────────────────────────────────────▲
    tokens, mask ─▶ one forward pass at the run's temperature ─▶ log-probs

The weights of the last version asked for stay in memory: sessions come in the order in which they
were served.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from connectors.config import Config
from connectors.kafka.client import Cluster
from connectors.records import Version
from connectors.run_dir import RunDir
from deploy.launcher import headwater_command
from trainer.batches import Rows
from trainer.checkpoint import run_store
from trainer.checkpoint_meta import kept_on_chain
from trainer.step_log import Chain, read_steps

if TYPE_CHECKING:
    from trainer.policy import PolicyModel

log = logging.getLogger(__name__)

FIRST: Final = Version(0, 0)
ASK_AGAIN_S: Final = 60.0
"""How long a version without a checkpoint counts as having none."""


class Recompute:
    """`operators.traces.Recompute` of a run; one thread. `locate`: the run's log. Nothing heavy is
    imported before the first log-prob is asked for."""

    def __init__(self, config: Config, run_dir: RunDir, locate: Callable[[], Cluster]) -> None:
        self._config, self._run_dir, self._locate = config, run_dir, locate
        self._folder = run_dir.path / "recompute"
        self._loaded: tuple[Version, PolicyModel] | None = None
        self._missing: dict[Version, float] = {}

    def __call__(
        self, version: Version, tokens: NDArray[np.int32], mask: NDArray[np.int8]
    ) -> NDArray[np.float32] | None:
        """[T], NaN where the mask is 0; None where no checkpoint of the version is kept, or the
        model knows no such token."""
        policy = self._policy(version)
        if policy is None:
            return None
        num_ids = policy.model.get_input_embeddings().num_embeddings
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < num_ids:
            return None
        return logprobs_of(policy, tokens, mask)

    def _policy(self, version: Version) -> PolicyModel | None:
        if self._loaded is not None and self._loaded[0] == version:
            return self._loaded[1]
        if time.monotonic() - self._missing.get(version, -ASK_AGAIN_S) < ASK_AGAIN_S:
            return None
        folder = self._weights(version)
        if folder is None:
            self._missing[version] = time.monotonic()
            return None
        self._loaded = None  # one at a time in memory
        policy = _policy(folder, self._config)
        self._loaded = version, policy
        log.info("log-probs of version %s are computed from %s", version, folder)
        return policy

    def _weights(self, version: Version) -> Path | None:
        """A model folder that holds them."""
        if version == FIRST:
            return self._config.resolve(self._config.model.path)
        step = self._step(version)
        if step is None:
            return None
        shutil.rmtree(self._folder, ignore_errors=True)
        command = headwater_command(
            "export", self._run_dir.path, "--step", step, "--to", self._folder
        )
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            log.warning("version %s: %s", version, said[-1] if said else "export failed")
            return None
        return self._folder

    def _step(self, version: Version) -> int | None:
        """Of its checkpoint on the chain."""
        chain = Chain()
        for offset, record in read_steps(self._locate()):
            chain.observe(offset, record)
        kept = kept_on_chain(run_store(self._config, self._run_dir), chain)
        return next((meta.step for meta in kept if meta.version == version), None)


def _policy(folder: Path, config: Config) -> PolicyModel:
    import torch

    from trainer.policy import load_policy

    torch.set_num_threads(config.trainer.num_threads)
    dtype = getattr(torch, config.model.dtype)
    return load_policy(folder, dtype, config.sampling.temperature).eval()


def logprobs_of(
    policy: PolicyModel, tokens: NDArray[np.int32], mask: NDArray[np.int8]
) -> NDArray[np.float32]:
    """Of the tokens where the mask is 1, each given those before it; NaN elsewhere."""
    import torch

    from trainer.packing import pack

    found = np.full(len(tokens), np.nan, np.float32)
    rows = Rows(
        ids=("row",),
        tokens=(tokens,),
        masks=(mask == 1,),
        logprobs=(found,),
        rewards=np.zeros(1),
        groups=np.zeros(1, np.int64),
    )
    with torch.no_grad():
        logprobs_N, _ = policy(pack(rows, (0,), [np.zeros(len(tokens), np.float32)]))
    found[mask == 1] = logprobs_N.float().numpy()
    return found
