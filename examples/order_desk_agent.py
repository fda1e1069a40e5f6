"""An agent over 30 turns with real tool functions: right answers, and the tokens that each turn computed again.

Start `make serve`, then: python examples/order_desk_agent.py [TURNS]
"""

from __future__ import annotations

import sys
from functools import partial

from turnkeep import Turnkeep
from turnkeep.clients.agent import run_agent
from turnkeep.clients.tools import Tool
from turnkeep.models.demo.generator import conversation as scripted_conversation
from turnkeep.models.demo.order_desk import OrderDesk

SEED = 4242


def tools_of(desk: OrderDesk, specifications: list[dict[str, object]]) -> list[Tool]:
    """The desk's own functions behind the schemas that the bundled model was trained on."""
    tools = [Tool.of(specification) for specification in specifications]
    return [
        Tool.wrapping(tool.specification, lambda name=tool.name, **values: desk.call_json(name, values))
        for tool in tools
    ]


def main() -> None:
    num_turns = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    script = scripted_conversation(SEED, num_turns)
    desk = OrderDesk(script.seed)
    num_right = 0
    with (
        Turnkeep() as client,
        client.conversation(system=script.system, tools=tools_of(desk, script.tools or [])) as conversation,
    ):
        # The desk is one ledger: its functions run one after another.
        run = partial(run_agent, conversation, parallel=False, temperature=0.0)
        for number, turn in enumerate(script.turns, 1):
            result = run(turn.user)
            is_right = all(fact in result.text for fact in turn.expected_facts)
            num_right += is_right
            num_computed = sum(answer.stats.num_computed_tokens for answer in result.turns)
            num_prompt = result.turns[-1].stats.num_prompt_tokens
            print(f"{number:>3} {num_computed:>5} of {num_prompt:>5} tokens computed  {turn.user} -> {result.text}")
        stats = conversation.stats
    prompt = sum(one.num_prompt_tokens for one in stats)
    computed = sum(one.num_computed_tokens for one in stats)
    print(f"{num_right} of {num_turns} answers are right; {computed} of {prompt} prompt tokens were computed")


if __name__ == "__main__":
    main()
