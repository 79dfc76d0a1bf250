"""Where remora runs: one module for each platform; the law: an adapter knows its host and the engine knows none."""
