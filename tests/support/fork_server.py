"""A clean Python that has imported torch, and forks whoever would start another one: see `forking`.

Its text is given to `python -c`, so that frames, `sys.path` and `__main__` are those of the processes that it
stands for. Between a forked child and this process runs the real keeper; it alone decides when a child ends.
"""

import array
import contextlib
import gc
import importlib.util
import json
import multiprocessing.process
import os
import select
import signal
import socket
import sys
import tempfile
import types


class _Child(BaseException):
    """Leaves all frames of this file in a new child, for the code that it shall run."""

    def __init__(self, code):
        self.code = code


def _served(channel, keeper):
    """Forks one keeper for each request until nobody can ask any more."""
    running = {}  # a descriptor of each keeper: its process, and where its exit status is sent
    while True:
        for ready in select.select([channel, *running], [], [])[0]:
            if ready is channel:
                request, descriptors = _request(channel)
                if request is None:
                    return
                process = os.fork()
                if process == 0:
                    _keep(keeper, request, descriptors)
                *given, answer = descriptors
                for descriptor in given:
                    os.close(descriptor)
                running[os.pidfd_open(process)] = process, answer
                _tell(answer, process)
            else:
                process, answer = running.pop(ready)
                os.close(ready)
                _tell(answer, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
                os.close(answer)


def _tell(answer, number):
    with contextlib.suppress(BrokenPipeError):  # whoever asked was interrupted
        os.write(answer, b"%d\n" % number)


def _request(channel):
    """Returns what is asked for, and the descriptors: three streams, the watched pipe, where to answer."""
    numbers = array.array("i")
    head, ancillary, _, _ = channel.recvmsg(8, socket.CMSG_SPACE(5 * numbers.itemsize))
    if not head:
        return None, []
    for _, _, data in ancillary:
        numbers.frombytes(data)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += channel.recv(1 << 16)
    return json.loads(text), list(numbers)


def _keep(keeper, request, descriptors):
    """Becomes the keeper, whose child is forked where it would be started."""
    os.setsid()
    *streams, watched, _ = descriptors
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.dup2(watched, 3)
    os.closerange(4, 1 << 16)
    keeper.keep(3, lambda: _fork(request, keeper))


def _fork(request, keeper):
    """Forks the child of a keeper, in which this raises what it shall run."""
    number = os.fork()
    if number:
        return keeper.Fork(number)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keeper.prepare_child()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.closerange(3, 1 << 16)
    _look_started(request)
    raise _Child(request["command"][-1])


def _look_started(request):
    """What a process finds that was started in this folder, with these variables, by this command."""
    os.chdir(request["folder"])
    for name in set(os.environ) - set(request["environment"]):
        del os.environ[name]
    os.environ.update(request["environment"])
    sys.orig_argv[:] = request["command"]
    multiprocessing.process.ORIGINAL_DIR = request["folder"]
    tempfile.tempdir = None
    if "torch" in sys.modules:  # Python's own generator is seeded anew by every fork
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _loaded(path):
    spec = importlib.util.spec_from_file_location("keeper", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(number, keeper, *imported):
    """Serves; in a child, returns what that shall run."""
    for module in imported:
        importlib.import_module(module)
    gc.freeze()  # at a child's end Python would look through all that was imported: a second in place of 0.3
    try:
        _served(socket.socket(fileno=int(number)), _loaded(keeper))
    except _Child as child:
        return child.code
    os._exit(0)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.argv[1:] = []
    fresh = {name: globals()[name] for name in ("__annotations__", "__builtins__", "__loader__")}
    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"]).update(fresh)
    exec(code, vars(sys.modules["__main__"]))
