"""Python models in worker processes.

A crash fails only the requests of one model. `model` is the engine's view, `supervisor` keeps a process alive,
`connection` is one worker process run, `channel` and `pipes` transport messages, `wire` and `encoding` define their
format, `main_loop` runs inside the worker.
"""
