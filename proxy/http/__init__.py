"""The HTTP surface: routes, dialects, forwarding, operator API."""
