"""`python -m tests.sim --seed N [--steps M] [--lives K]`: live K hostile lives, from seed N on.

The same numbers live the same lives again, so what was found is replayed by the command that it prints.
"""

import argparse
import sys
import traceback
from collections import Counter

from tests.sim.life import STEPS, live


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lives", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print what happened, too")
    args = parser.parse_args()
    outcomes: Counter[str] = Counter()
    requests = found = 0
    for seed in range(args.seed, args.seed + args.lives):
        try:
            told = live(seed, args.steps)
        except Exception:  # noqa: BLE001  whatever was found is shown, and the next life lived
            traceback.print_exc()
            found += 1
            continue
        outcomes += told.outcomes
        requests += told.requests
        if args.trace:
            print("\n".join(told.trace))
    print(f"{args.lives} lives, {requests} requests, {found} found wrong")
    print(", ".join(f"{name} {count}" for name, count in outcomes.most_common()))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
