"""An extension -> the compile and link commands that its build_ext would run. Runs none of them."""

import os

from setuptools import Distribution


def commands(build_ext, extension, place, made=None):
    """The compile and the link commands. Folders for objects are made in ``place``; ``made`` is called with each object's path."""
    collected = []

    def collect(command, **_):
        collected.append([str(word) for word in command])
        if "-c" in command:
            target = command[command.index("-o") + 1]
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if made:
                made(target)

    class Collecting(build_ext):
        def build_extensions(self):
            # the name of the method that runs a command depends on the release of setuptools
            self.compiler.spawn = self.compiler.call = collect
            super().build_extensions()

    command = Collecting(Distribution({"name": "deepspeed", "ext_modules": [extension]}))
    command.build_temp, command.build_lib, command.force = os.path.join(place, "temp"), os.path.join(place, "lib"), True
    command.ensure_finalized()
    command.run()
    return [words for words in collected if "-c" in words], [words for words in collected if "-c" not in words]
