"""The page of /ui, its parts, and the state that it asks for every second.

The page itself holds nothing of anybody and needs no key; the state does, and shows the conversations of its tenant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

import turnkeep
from turnkeep.server.cache_report import cache_report
from turnkeep.server.chat_service import ChatService
from turnkeep.server.conversations import cache_root
from turnkeep.server.engine_supervisor import EngineSupervisor
from turnkeep.server.http_guard import TENANT, json_response

FOLDER = Path(__file__).parent
PARTS = {
    "/ui": ("page.html", "text/html"),
    "/ui/style.css": ("style.css", "text/css"),
    "/ui/state.js": ("state.js", "text/javascript"),
    "/ui/tools.js": ("tools.js", "text/javascript"),
    "/ui/chat.js": ("chat.js", "text/javascript"),
}
HEADERS = {
    # All there is comes from this server, and nothing may put the page into a frame of its own.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}
MAX_CONVERSATIONS = 20


class DashboardEndpoint:
    """The handlers; one instance serves all requests."""

    def __init__(self, service: ChatService, supervisor: EngineSupervisor) -> None:
        self._service = service
        self._supervisor = supervisor
        self._parts = {path: ((FOLDER / name).read_text(), kind) for path, (name, kind) in PARTS.items()}

    async def part(self, request: web.Request) -> web.Response:
        """The page that shows what the server does."""
        text, kind = self._parts[request.path.rstrip("/")]
        return web.Response(text=text, content_type=kind, charset="utf-8", headers=HEADERS)

    async def state(self, request: web.Request) -> web.Response:
        """What the page shows: engine, pools, counters, and the newest conversations of this tenant."""
        root = cache_root(request[TENANT] or None, None)
        stats = await self._supervisor.read_stats()
        ready = self._supervisor.ready
        engine: dict[str, Any] = {"state": self._supervisor.state}
        if ready is not None:
            engine |= {
                "limiting_resource": ready.limiting_resource,
                "max_running": ready.max_running,
                "max_model_len": ready.max_model_len,
                "page_size": ready.page_size,
                "notices": ready.notices,
            }
        if stats is not None:
            engine |= {
                "num_running": stats.num_running,
                "num_waiting": stats.num_waiting,
                "num_suspended": stats.num_suspended,
                "gauges": stats.gauges,
                "counters": stats.counters,
            }
        conversations = self._service.conversations.newest(root, MAX_CONVERSATIONS)
        body = {
            "version": turnkeep.__version__,
            "model": self._service.served_names[0],
            "engine": engine,
            "conversations": [cache_report(conversation) for conversation in conversations],
        }
        return json_response(body)


def add_dashboard(app: web.Application, service: ChatService, supervisor: EngineSupervisor) -> None:
    """Add the routes of /ui."""
    dashboard = DashboardEndpoint(service, supervisor)
    for path in (*PARTS, "/ui/"):
        app.router.add_get(path, dashboard.part)
    app.router.add_get("/ui/state", dashboard.state)
