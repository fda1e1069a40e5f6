"""Take a turn back, say it otherwise, and keep both branches.

Start `make serve`, then: python examples/edit_and_branch.py
"""

from __future__ import annotations

from turnkeep import Turnkeep


def main() -> None:
    with Turnkeep() as client, client.conversation() as conversation:
        conversation.send("Mara lives in Oslo.")
        print("asked:  ", conversation.send("Where does Mara live?").text)
        branch = conversation.fork("edited")
        branch.rewind(2)
        branch.send("Mara lives in Rome.")
        edited = branch.send("Where does Mara live?")
        print("edited: ", edited.text)
        again = conversation.send("Where does Mara live?")
        print("before: ", again.text, f"({again.stats.num_cached_tokens} tokens reused)")
        branch.close()


if __name__ == "__main__":
    main()
