"""Save a conversation, stop the server, start it again, go on.

Start `make serve`, then: python examples/resume_after_restart.py; restart the server; run it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from turnkeep import Turnkeep


def main() -> None:
    saved = Path(sys.argv[1] if len(sys.argv) > 1 else "conversation.json")
    with Turnkeep() as client:
        if not saved.exists():
            conversation = client.conversation()
            print(conversation.send("Mara lives in Oslo.").text)
            saved.write_text(conversation.to_json())
            print(f"saved to {saved}: restart the server and run this again")
            return
        conversation = client.load_conversation(saved.read_text())
        turn = conversation.send("Where does Mara live?")
        print(turn.text)
        print(f"{turn.stats.num_cached_tokens} of {turn.stats.num_prompt_tokens} prompt tokens were reused")
        saved.unlink()


if __name__ == "__main__":
    main()
