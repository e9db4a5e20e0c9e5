"""The environment vLLM's processes run in; they inherit ours, so it is set before vLLM is imported.

Everything is a default that a user's own environment overrides, except the thread count, which is
an option, and the folder for temporary files. `CAUSE` also tells our plugin that a vLLM is ours
(connectors.engines.vllm.plugin).
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

CAUSE: Final = "HEADWATER_VLLM_CAUSE"
"""A file in which a vLLM process of ours says why it dies. Its folder holds all that they leave."""
FOLDER: Final = "headwater-vllm-"
SOCKET_CHARS: Final = 107 - len("/headwater-vllm-12345678/01234567-0123-0123-0123-0123456789ab")
"""Of a folder for temporary files, at most: in its folder vLLM makes Unix sockets, named so."""

_EVERYWHERE: Final = {
    "HF_HUB_OFFLINE": "1",  # the model is a folder; nothing is asked of a hub
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # our process has threads and a running loop
    "VLLM_HOST_IP": "127.0.0.1",  # an engine's processes are on one machine
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONWARNINGS": "ignore",
}
_ON_CPU: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other roles share the cores
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",  # compiling costs a minute and needs a compiler
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about what the CPU build always lacks
}


def prepare(*, on_cpu: bool, num_threads: int, one_worker: bool) -> Path:
    """Sets the environment; returns the file that `CAUSE` names, which is not there yet. Its folder
    is removed when this process ends, also when it is killed (by the plugin)."""
    defaults = _EVERYWHERE | (_ON_CPU if on_cpu else {})
    if on_cpu and one_worker:
        # The worker inside the engine's own process: one process and 0.5 GB less. vLLM starts one
        # of its own to bind threads, which "nobind" leaves out.
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    usual = tempfile.gettempdir()  # fixed by this call: what follows changes vLLM's processes' only
    short = usual if len(usual) <= SOCKET_CHARS else "/tmp"
    folder = tempfile.mkdtemp(prefix=FOLDER, dir=short)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    cause = Path(folder, "cause")
    os.environ |= {
        "OMP_NUM_THREADS": str(num_threads),
        "TMPDIR": folder,
        "VLLM_RPC_BASE_PATH": folder,
        CAUSE: str(cause),
    }
    return cause
