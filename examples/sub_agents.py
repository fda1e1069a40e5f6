"""Three sub-agents forked from one conversation, at the same time: each shares what the parent has computed.

Start `make serve`, then: python examples/sub_agents.py
"""

from __future__ import annotations

import asyncio

from turnkeep import AsyncTurnkeep

FACTS = ("Mara lives in Oslo.", "Nils lives in Rome.", "Lena lives in Paris.")


async def main() -> None:
    async with AsyncTurnkeep() as client, await client.conversation() as parent:
        for fact in FACTS:
            await parent.send(fact)
        agents = [parent.fork(name) for name in ("mara", "nils", "lena")]
        questions = [f"Where does {agent.conversation_id.rpartition('.')[2].capitalize()} live?" for agent in agents]
        answers = await asyncio.gather(*(agent.send(text) for agent, text in zip(agents, questions, strict=True)))
        for question, answer in zip(questions, answers, strict=True):
            stats = answer.stats
            print(f"{question} {answer.text} ({stats.num_cached_tokens} of {stats.num_prompt_tokens} tokens reused)")
        for agent in agents:
            await agent.close()


if __name__ == "__main__":
    asyncio.run(main())
