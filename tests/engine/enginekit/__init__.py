"""What the engine tests share: server processes, HTTP exchanges, traces, models, loads."""
