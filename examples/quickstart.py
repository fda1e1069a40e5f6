"""Two turns, and what the second one did not compute again. Start `make serve`, then: python examples/quickstart.py"""

from __future__ import annotations

from turnkeep import Turnkeep
from turnkeep.clients.turn import TextDelta


def main() -> None:
    with Turnkeep() as client, client.conversation() as conversation:
        with conversation.stream("Mara lives in Oslo.") as events:
            for event in events:
                if isinstance(event, TextDelta):
                    print(event.text, end="", flush=True)
        print()
        turn = conversation.send("Where does Mara live?")
        print(turn.text)
        print(f"{turn.stats.num_cached_tokens} of {turn.stats.num_prompt_tokens} prompt tokens were reused")


if __name__ == "__main__":
    main()
