"""Sockets, event loop and threads around the engine.

All uses of asyncio, FastAPI and grpcio are here.
"""
