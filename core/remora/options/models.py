"""Options of repositories, models and their loading."""

from __future__ import annotations

from pathlib import Path

from remora.options.fields import fragment, option

CONTROL_MODES = ("none", "poll", "explicit", "ondemand")


@fragment
class RepositoryOptions:
    """Where models come from."""

    __slots__ = ()

    model_repository: tuple[str | Path, ...] = option(
        "Model repository: a directory with one folder per model, or its URL (s3://, gs://, as://). Repeatable.",
        metavar="DIR",
        many=True,
        basic=True,
    )
    paths: tuple[str | Path, ...] = option(
        "A repository, a model directory, a model file such as model.onnx, an archive, the URL of any of them, a "
        "Python file with decorated functions, or a file or folder that another library wrote.",
        metavar="PATH",
        many=True,
        basic=True,
    )
    model_cache_directory: str = option(
        "Cache directory for models from cloud storage and archives; empty: the user's cache directory.",
        default="",
        metavar="DIR",
    )
    model_cache_byte_size: int = option(
        "Size limit of the model cache, in bytes; the least recently used models that are not in use are evicted.",
        default=50 << 30,
        metavar="BYTES",
    )
    model_name: str = option(
        "Name of the model whose files lie directly at PATH; empty: the name of that folder or file.",
        default="",
        metavar="NAME",
        basic=True,
    )
    reload: bool = option(
        "Check every second whether the files of models have changed, and replace changed models. For development; "
        "implies --model-control-mode=poll.",
        default=False,
        basic=True,
    )
    trust_pickle: bool = option(
        "Serve models at PATH that are pickles (joblib, MLflow), and install the packages of a requirements.txt beside "
        "a model file. Both run code that the file's author chose: use this only for authors whom you trust.",
        default=False,
        basic=True,
    )
    id: str = option("Server name in the metadata.", default="triton", metavar="NAME")


@fragment
class ModelOptions:
    """Which models load, when and within which memory."""

    __slots__ = ()

    model_control_mode: str = option(
        "none: load all models at startup. poll: also reload models when their repository changes. explicit: load "
        "the --load-model models, then what clients request. ondemand: load each model at its first request.",
        default="none",
        choices=CONTROL_MODES,
        basic=True,
    )
    load_model: tuple[str, ...] = option(
        "Model to load at startup in explicit mode; * for all. In ondemand mode it is never evicted. Repeatable.",
        metavar="NAME",
        many=True,
        basic=True,
    )
    model_memory_budget: int = option(
        "Limit of the estimated memory of all models, in bytes; 0: the available memory. In ondemand mode the least "
        "recently used idle models are evicted.",
        default=0,
        metavar="BYTES",
    )
    memory_gate: bool = option("Refuse a load whose estimated peak memory does not fit.", default=True)
    repository_poll_secs: int = option(
        "Polling interval of the repositories in poll mode, in seconds; 0: never.", default=15, metavar="S"
    )
    model_namespacing: bool = option(
        "Treat models of the same name in several repositories as different; an ensemble uses those of its repository.",
        default=False,
    )
    model_load_retry_count: int = option("Retries of a failed load.", default=0, metavar="N")
    trial_load: bool = option(
        "Load a model's files in a child process first, so that a damaged file cannot end the server; files that "
        "passed are remembered in the user's cache directory. Not for ONNX and Python models.",
        default=False,
    )
    exit_on_error: bool = option("Exit when a model fails to load at startup.", default=True)
    release_directory: str = option(
        "Folder that keeps the state of releases over a restart; empty: the folder .remora in the first local "
        "repository, made when a release starts.",
        default="",
        metavar="DIR",
    )
    strict_readiness: bool = option("Report ready only when every model is ready.", default=True)
    disable_auto_complete_config: bool = option(
        "Use configurations as written; derive nothing from the model.", default=False
    )
    model_config_name: str = option("Use configs/NAME.pbtxt of a model that has it.", default="", metavar="NAME")
    model_load_thread_count: int = option("Models that load concurrently.", default=4, metavar="N")


@fragment
class LoadWaitOptions:
    """How requests wait for models that load."""

    __slots__ = ()

    wait_for_models: bool = option(
        "Hold requests until the startup models are loaded; if false, answer them as for unknown models.",
        default=True,
    )
    max_waiting_requests: int = option(
        "HTTP requests that may wait for loading models; further ones are refused.",
        default=1024,
        metavar="N",
    )
    waiting_secs: int = option(
        "Longest wait of a request for a loading model, in seconds; an earlier deadline of the request applies.",
        default=60,
        metavar="S",
    )
