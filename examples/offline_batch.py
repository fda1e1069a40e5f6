"""Many prompts without a server: python examples/offline_batch.py"""

from __future__ import annotations

from turnkeep import LLM

NAMES = ("Mara", "Nils", "Lena", "Hugo")


def main() -> None:
    with LLM("demo") as llm:
        chats = [[{"role": "user", "content": f"{name} lives in Oslo."}] for name in NAMES]
        for name, answer in zip(NAMES, llm.chat(chats, temperature=0.0), strict=True):
            print(f"{name}: {answer.text}")


if __name__ == "__main__":
    main()
