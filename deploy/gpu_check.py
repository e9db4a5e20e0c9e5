"""`python -m deploy.gpu_check`: does what needs a GPU work on this machine, and how fast is it?

    group                    the weights channel's broadcasts: NCCL between the GPUs there are
    trainer                  bfloat16 training steps, repeated bit for bit
    hf-memory, hf-group,     a real engine gets weights, through shared memory and through the
    vllm-memory, vllm-group  group; then its log-probs are compared with a forward pass

Every check is a process of its own under a time limit: one that hangs or crashes is a result, and
the next one begins. `--cpu` runs the same functions with gloo and no GPU (minutes). Exit 0 when
none failed, else 1.

Figures: `gb` were published in `seconds`; `of_a_copy` is the speed as a share of that of a plain
copy on the same device (of the tiny model's 1.4 MB all is latency); `form_s` seconds to form the
group; `gap` is how far the engine's log-probs are from a forward pass of the weights it was sent,
`gap_to_old` of those before, both a token's mean in nats.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from deploy import errors
from deploy.launcher import CHILD_ENVIRONMENT, ChildProcess, last_line
from deploy.output import answer

LIMITS_S: Final = {
    "group": 180.0,
    "trainer": 300.0,
    "hf-memory": 300.0,
    "hf-group": 300.0,
    "vllm-memory": 600.0,
    "vllm-group": 600.0,
}
"""The checks, in order, and how long each may take."""
SHAPES: Final = ("tiny", "135m")


@dataclass(frozen=True, kw_only=True)
class Check:
    """`ok`: it did not fail; then `skipped` says why it was not done, or else `figures` hold. They
    are in seconds, GB and nats; `of_a_copy` is relative to a plain copy of the same bytes."""

    name: str
    ok: bool
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    skipped: str | None = None
    error: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    gpus = [] if arguments.cpu else _gpus()
    device = "cpu" if arguments.cpu else "cuda"
    checks = []
    for name in arguments.only or LIMITS_S:
        for shape in arguments.shape or (SHAPES[:1] if arguments.cpu else SHAPES):
            if device == "cuda" and not gpus:
                check = Check(name=f"{name} {shape}", ok=True, skipped="no GPU")
            else:
                check = run(name, device, shape, arguments.limit_s or LIMITS_S[name])
            checks.append(check)
            if not arguments.json:
                print(_line(check), flush=True)
    ok = all(check.ok for check in checks)
    if arguments.json:
        answer(True, {"gpus": gpus, "ok": ok, "checks": [asdict(check) for check in checks]}, ())
    return errors.OK if ok else errors.FAILED


def run(name: str, device: str, shape: str, limit_s: float) -> Check:
    """One check; nothing of it is left at the end."""
    with tempfile.TemporaryDirectory(prefix="headwater-check-") as folder:
        found, log = Path(folder, "found.json"), Path(folder, "log")
        arguments = [name, device, shape, str(found), str(os.getpid())]
        started = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "deploy.device", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **CHILD_ENVIRONMENT, "TMPDIR": folder},
                start_new_session=True,
            )
        try:
            code = process.wait(limit_s)
            error = f"ended with {code}: {last_line(log)}" if code else None
        except subprocess.TimeoutExpired:
            error = f"took more than {limit_s:g} s: {last_line(log)}"
        finally:
            ChildProcess(process).kill()
            process.wait()
        seconds = time.monotonic() - started
        result = {} if error else json.loads(found.read_text())
    return Check(name=f"{name} {shape}", ok=error is None, seconds=seconds, error=error, **result)


def _gpus() -> list[str]:
    """Names of the GPUs torch finds, asked in a process of its own: asking takes memory on them."""
    program = (
        "import torch, json\n"
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "print(json.dumps(names))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True)
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def _line(check: Check) -> str:
    if check.skipped is not None:
        return f"skip  {check.name}: {check.skipped}"
    if check.error is not None:
        return f"FAIL  {check.name} ({check.seconds:.0f} s): {check.error}"
    figures = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in check.figures.items()
    )
    return f"ok    {check.name} ({check.seconds:.0f} s): {', '.join(figures)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--cpu", action="store_true", help="the same checks without a GPU")
    parser.add_argument("--only", action="append", choices=list(LIMITS_S), help="repeatable")
    parser.add_argument(
        "--shape", action="append", choices=SHAPES,
        help="size of the models; repeatable (default: both, on the CPU tiny)",
    )  # fmt: skip
    parser.add_argument("--limit-s", type=float, help="time limit of each check")
    return parser


if __name__ == "__main__":
    sys.exit(main())
