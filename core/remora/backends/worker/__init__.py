"""Python models in processes of their own: a crash takes one model's requests along and nothing else.

`model` is what the engine sees, `keeper` keeps a process alive, `link` is one life of it, `channel` and `pipes` carry
messages, `wire` and `forms` say what they look like, `serving` is the other side.
"""
