"""The Responses API: items, events, stored responses and chains of them, over HTTP and WebSockets."""
