"""The V2 REST protocol and its neighbours as pure codecs."""
