"""Commands for a running server: `infer`, `models`, `explain`, `startup` and `release`."""
