"""Where models come from; the law: a model's name is looked up in a listing, never joined to a path."""
