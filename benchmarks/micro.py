"""The parts of a step that are measured alone: one table each, one JSON object of all.

python -P -m benchmarks.micro [--rounds N] [--json FILE]
"""

from benchmarks import logprobs, packing
from benchmarks.table import main

if __name__ == "__main__":
    main(str(__doc__), [logprobs.measure, packing.measure])
