"""Sockets, event loop and threads around the engine, with all uses of asyncio, FastAPI and grpcio."""
