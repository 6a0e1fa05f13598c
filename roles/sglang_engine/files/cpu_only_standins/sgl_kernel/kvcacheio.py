"""Names that SGLang imports for its hierarchical cache; each one raises when it is called."""


def __getattr__(name):
    if not name.startswith("transfer_kv_"):
        raise AttributeError(name)

    def unavailable(*_args, **_kwargs):
        raise RuntimeError(f"sgl_kernel.kvcacheio.{name} needs the real sgl-kernel package (CPU-only stand-in)")

    return unavailable
