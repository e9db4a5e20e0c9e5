"""API keys: whose they are, and that a changed file is read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from connectors.config import ConfigError
from connectors.gateway.errors import Refused
from connectors.gateway.keys import Keys


def write(file: Path, content: str) -> None:
    """As editors do: another file under the same name."""
    new = file.with_suffix(".new")
    new.write_text(content)
    os.replace(new, file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# ours\nsk-ada ada\n\nsk-other   # without a name\n")
    return path


def test_without_a_file_everybody_is_served() -> None:
    assert Keys(None).owner(None) == ""
    assert Keys(None).owner("Bearer anything") == ""


def test_a_key_says_whose_the_request_is(file: Path) -> None:
    keys = Keys(file)
    assert keys.owner("Bearer sk-ada") == "ada"
    other = keys.owner("bearer sk-other")
    assert len(other) == 12
    assert "other" not in other


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "sk-ada", "Basic sk-ada",
                                   "Bearer sk-ad", "Bearer sk-adaa", "Bearer é"])  # fmt: skip
def test_what_is_no_key_is_not_served(file: Path, given: str | None) -> None:
    with pytest.raises(Refused) as error:
        Keys(file).owner(given)
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")


def test_a_changed_file_counts_at_once_and_a_broken_one_changes_nothing(file: Path) -> None:
    keys = Keys(file)
    write(file, "sk-new bob\n")
    assert keys.owner("Bearer sk-new") == "bob"
    with pytest.raises(Refused):
        keys.owner("Bearer sk-ada")
    write(file, "one two three\n")
    assert keys.owner("Bearer sk-new") == "bob"
    file.unlink()
    assert keys.owner("Bearer sk-new") == "bob"
    write(file, "sk-ada ada\n")
    assert keys.owner("Bearer sk-ada") == "ada"


@pytest.mark.parametrize("content", ["", "# only\n", "key a:b\n", "one two three\n"])
def test_a_file_that_is_none_of_keys_is_an_error_at_the_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError, match="keys_file"):
        Keys(path)
    with pytest.raises(ConfigError, match="keys_file"):
        Keys(tmp_path / "none")
