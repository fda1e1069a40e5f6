"""/ui: a page that shows what the server does, and a chat box. No build step, nothing from elsewhere."""
