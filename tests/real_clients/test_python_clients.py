"""The official Python clients, as `make clients` runs them: a call, a second turn in a new process, and a fault each.

Those whose packages the tests have anyway; the others, and the agents on the command line, are left to `make clients`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import run as clients
from recording_proxy import FaultProxy, Seen, reused_share


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[FaultProxy]:
    server, target = clients.start_server(tmp_path)
    try:
        await clients.wait_until_ready(target)
        async with FaultProxy(target).running() as running:
            yield running
    finally:
        server.terminate()
        server.wait(30)


async def test_the_official_clients_finish_two_turns_in_two_processes_over_a_fault(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    rounds = [("openai_chat", "503", "ok"), ("openai_responses", "drop", "raised"), ("anthropic_messages", "503", "ok")]
    for name, fault, expected in rounds:
        client = clients.python_client(name, Path(sys.executable), proxy.url)
        place = tmp_path / name
        place.mkdir()
        proxy.begin(fault)
        notes: list[str] = []
        assert await clients.asyncio.to_thread(clients.two_turns, client, place, proxy, notes) == expected, notes
        assert proxy.num_faults == 1
        assert [one.status for one in proxy.seen] == [200] * 4
        share = reused_share(proxy.seen)
        assert share is not None
        assert share >= 0.95, proxy.seen


def test_the_share_is_of_what_is_sent_again_and_side_calls_do_not_count() -> None:
    def seen(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> Seen:
        return Seen("/v1/responses", 200, num_prompt_tokens, num_cached_tokens, num_output_tokens, {})

    assert reused_share([seen(100, 0, 11)]) is None
    assert reused_share([seen(100, 0, 11), seen(40, 0, 5), seen(150, 110, 1)]) == 1.0
    assert reused_share([seen(100, 0, 11), seen(150, 55, 1), seen(200, 150, 1)]) == 0.5
