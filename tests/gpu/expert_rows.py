"""How often a row's logits change with the tokens of its neighbours, for forms of experts. A program of its
own, since the math library reads its settings once: python -m tests.gpu.expert_rows FORM..."""

import sys

import torch

from regrow.gpu import forward
from regrow.gpu.runner import ModelRunner
from regrow.models.random_models import build_random
from tests.gpu.drive import SLOTS, plan_of, prompt, read, row

TRIES = 20


@torch.inference_mode()
def changes(form: str) -> int:
    """Step slot 1 of qwen3_moe from one state `TRIES` times, beside other tokens each time."""
    torch.set_num_threads(1)
    forward._DECODING_EXPERTS = form
    runner = ModelRunner(build_random("qwen3_moe"), SLOTS, 64, "full")
    runner._row_exact = True  # or it would step a form that gathers rows singly
    for slot in range(SLOTS):
        read(runner, slot, prompt(20, slot), plan_of(20))
        runner.join(slot)
    seen = []
    for turn in range(TRIES):
        tokens = [65 if slot == 1 else (turn * 7 + slot * 31) % 256 for slot in range(SLOTS)]
        seen.append(runner.decode([row(runner, slot, token) for slot, token in enumerate(tokens)])[1])
        for slot in range(SLOTS):
            runner.commit(slot, 0)
    return sum(not torch.equal(logits, seen[0]) for logits in seen)


if __name__ == "__main__":
    print(*(changes(form) for form in sys.argv[1:]))
