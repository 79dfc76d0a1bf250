"""Commands for platforms: `deploy`, `emulate`, `manifests`, `image` and `build`."""
