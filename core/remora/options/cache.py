"""Options of the response cache."""

from __future__ import annotations

from collections.abc import Mapping

from remora.options.fields import fragment, option

_CACHES = ("local", "redis")


@fragment
class CacheOptions:
    """Response cache of the models that enable it."""

    __slots__ = ()

    cache_config: tuple[str, ...] = option(
        "Response cache for models with response_cache { enable: true }: local,size=BYTES, or redis,host=NAME and "
        "redis,port=NUMBER. Repeatable.",
        metavar="CACHE,KEY=VALUE",
        many=True,
    )
    response_cache_byte_size: int = option(
        "Older form of --cache-config=local,size=BYTES; 0: no cache.", default=0, metavar="BYTES"
    )


def cache_settings(options: CacheOptions) -> tuple[str, dict[str, str]] | None:
    """Return the response cache's kind and settings, None for no cache [K01].

    Raises ValueError for entries that are not CACHE,KEY=VALUE, for an unknown cache, and with Triton's texts for two
    caches. The error repeats no values because a value may be a password.
    """
    if options.response_cache_byte_size and options.cache_config:
        raise ValueError(
            "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided. "
            "Please provide one or the other."
        )
    if options.response_cache_byte_size:
        return "local", {"size": str(options.response_cache_byte_size)}
    found: dict[str, dict[str, str]] = {}
    for entry in options.cache_config:
        cache, _, pair = entry.partition(",")
        key, equals, value = pair.partition("=")
        if not cache or not equals or not key:
            raise ValueError(f"--cache-config={cache},...: expected CACHE,KEY=VALUE such as local,size=1048576")
        if cache not in _CACHES:
            raise ValueError(
                f"--cache-config={cache},{key}: there is no cache '{cache}'; there is {', '.join(_CACHES)}"
            )
        found.setdefault(cache, {})[key] = value
    if len(found) > 1:
        raise ValueError(
            "found multiple cache configurations, but only a single cache is currently supported\n"
            "--cache-config names local and redis: remove the entries of one of them"
        )
    return next(iter(found.items()), None)


def cache_size(given: Mapping[str, str]) -> int:
    """Return the local cache's size in bytes.

    Raises ValueError for other settings or a bad size.
    """
    for key in given:
        if key != "size":
            raise ValueError(f"--cache-config=local,{key}: the local cache has no setting '{key}'; it has size")
    text = given["size"]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"--cache-config=local,size={text}: expected a number of bytes")
    return int(text)
