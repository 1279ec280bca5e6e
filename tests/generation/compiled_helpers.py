"""A backend of torch.compile that counts, and the options of a call that compiles on every device."""

from transformers import CompileConfig


class Graphs:
    """A backend that runs a graph as it is and counts."""

    def __init__(self):
        self.made = self.runs = 0

    def __call__(self, graph, inputs):
        self.made += 1

        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run

    def __deepcopy__(self, memo):  # transformers copies the arguments of torch.compile
        return self


def options(backend, **more):
    """Options of a `generate` call over a static cache, compiled with `backend`."""
    config = CompileConfig(backend=backend, mode=None, dynamic=False)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config, **more}
