"""Sockets, event loop and threads around the engine; the only place where asyncio, FastAPI and grpcio live."""
