"""Tokens per second with drafts against plain decoding: the same engine settings, prompts and answers, in turns.

Order-desk conversations of the bundled model, greedy, each answered to its end; one conversation at a time and several
at once. Then 300 tokens each, nearly all beyond the end of the answer, where the draft head was never trained and is
hardly ever right: what drafts cost where they are of no use.

    OMP_WAIT_POLICY=passive python -m benchmarks.draft_speed [--repeats 5] [--clock cpu]
"""

from __future__ import annotations

import argparse

import msgspec
from benchmarks.paired_speed import PairedSpeed, in_groups, options, order_desk_prompts

NUM_UNFORESEEN = 300


def measure(arguments: argparse.Namespace) -> PairedSpeed:
    paired = PairedSpeed(arguments)
    prompts, sampling = order_desk_prompts(arguments.conversations, arguments.seed)
    engines = paired.engines("mtp")
    for together in arguments.together:
        num_different = paired.compare(f"{together} at once", engines, in_groups(prompts, together), sampling)
        if num_different:  # beyond an answer's end likely tokens tie, which 16 bits break either way
            raise SystemExit("the answers differ")
    unforeseen = msgspec.structs.replace(sampling, max_new_tokens=NUM_UNFORESEEN, ignore_eos=True)
    for together in arguments.together:
        # Engines of their own, which have not learnt that drafts are good.
        name = f"{together} at once, beyond the end"
        paired.compare(name, paired.engines("mtp"), [prompts[:together]], unforeseen)
    return paired


if __name__ == "__main__":
    measure(options(__doc__ or "").parse_args()).print()
