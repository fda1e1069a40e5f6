"""The reference of all settings of `turnkeep serve`, written from the options themselves.

python -m turnkeep.server.option_reference > docs/configuration.md
"""

from __future__ import annotations

import argparse

HEAD = """\
# Configuration

Nothing has to be set. Every setting of `turnkeep serve` is an option on the command line and, without its dashes and
with underscores, a key in the file of `--config FILE` (TOML, or YAML with `pip install 'turnkeep[yaml]'`). Tables in
the file only group keys; the command line goes before the file. An option that may be repeated is a list, a switch is
true or false:

```toml
port = 9000

[cache]
reuse_policy = "per_request"

[cache.snapshots]
periodic_snapshot_interval = 4096
additional_snapshot_offsets_from_end = [0, 32]
```

What is asked for and cannot be is said once at the start: an interval under the reuse policy `per_conversation` (turns
have ends of their own; it is taken as 0), `all_reusable` with recurrent layers (`per_request` then), and a model with
recurrent layers for which no rule ever keeps a state (prefix caching is then disabled). The old name of the interval
and the new one together are an error.
"""


def option_reference(parser: argparse.ArgumentParser) -> str:
    """Markdown: a table for each group of options of one command."""
    parts = [HEAD]
    for group in parser._action_groups:
        rows = [_row(action) for action in group._group_actions if action.option_strings and action.dest != "help"]
        if rows:
            title = (group.title or "").capitalize()
            parts += [f"\n## {title}\n", "| option | default | meaning |", "| --- | --- | --- |", *rows]
    return "\n".join(parts) + "\n"


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.choices is not None:
        names += " " + ", ".join(f"`{choice}`" for choice in action.choices)
    elif action.nargs != 0:
        names += f" {action.metavar or action.dest.upper()}"
    default = "" if action.default is None else action.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    meaning = (action.help or "").replace("|", "\\|")
    return f"| {names} | {default} | {meaning} |"


def main() -> None:
    from turnkeep.server.cli import serve_parser

    print(option_reference(serve_parser()), end="")


if __name__ == "__main__":
    main()
