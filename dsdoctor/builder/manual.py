"""The manual pages of what building, installing, checking and the cache find. How they read: ``core.manual``."""

PAGES = {
    "op-cannot-be-built": """An op that was named cannot be built; the finding says what stands in the way.

Why it matters: DeepSpeed's own setup.py would leave such an op out without an error, and it would be missing at run
time.

How to fix it: Do what the finding advises. Look at the op alone, and with `--deep` ask the compiler too.

    $ python -m dsdoctor check --op NAME --deep

Since: 0.1""",
    "op-failed": """An op was compiled, and the compiler, the linker or the test of the result refused it.

The finding shows the first error and the path of the log.

Why it matters: The wheel is not what was asked for: it lacks this op, or was not made.

How to fix it: Follow the finding. Its log can be read again.

    $ python -m dsdoctor diagnose LOG

Since: 0.1""",
    "op-does-not-load": """An installed op was imported with this torch, in a process of its own, and that failed.

The finding holds the loader's words: an undefined symbol comes from another torch, a missing library from the
system.

Why it matters: DeepSpeed fails at the same place when the training first uses the op.

How to fix it: Build the op for this environment, then load it again.

    $ python -m dsdoctor build-wheel --ops NAME
    $ python -m dsdoctor verify --installed --load

Since: 0.1""",
    "cache-entry-damaged": """A compiled op or a wheel in the cache is not what was stored: a byte, a size or a name differs.

The entry was removed.

Why it matters: A wheel made of it would not be the one that was built and tested. If it happens again, the disk may
be failing.

How to fix it: Build again, which compiles the op anew. To read every byte of the cache:

    $ python -m dsdoctor cache verify

Since: 0.1""",
    "wheel-not-published": """The wheel was built and tested, and could not be put into the index.

The wheel is in the output folder.

Why it matters: Whoever installs from the index does not get this wheel.

How to fix it: Make the folder of the index writable, and build again with the same --index; the ops come from the
cache.

Since: 0.1""",
    "wheel-name-mismatch": """The name of a wheel in an index says that it was built for another torch or CUDA release.

Names such as 0.18.9+cu.12.8.torch.2.11 say so. Only what the name says was judged: the wheel was not fetched.

Why it matters: DeepSpeed's loader refuses ops of another torch minor or CUDA release.

How to fix it: Take a wheel for this torch, or build one.

    $ python -m dsdoctor install --build

Since: 0.1""",
    "wheel-yanked": """A wheel was taken back by whoever made it: the index marks it as yanked.

Why it matters: It is known to be bad. pip takes it only where its version is named exactly.

How to fix it: Take another release.

Since: 0.1""",
    "wheel-not-fetched": """A wheel that an index lists could not be fetched, or is not the file that the index describes.

Why it matters: Nothing is known of it. One whose sha256 differs from the index's was changed after it was listed.

How to fix it: Check the network. Where the digest differs, tell whoever keeps the index.

Since: 0.1""",
    "dependencies-not-installed": """DeepSpeed is installed, and pip could not install the packages that it needs beside itself.

Why it matters: An import of DeepSpeed fails at the first of them that is missing.

How to fix it: Fix what pip reports, then install them.

    $ python -m dsdoctor install

Since: 0.1""",
    "wheel-without-ops": """A DeepSpeed holds no compiled op.

It is made of Python alone, as the one on PyPI.

Why it matters: It serves runs that need no op. Any other op is compiled at its first use, which takes minutes and needs a
compiler, ninja and, for CUDA, a whole toolkit on every machine.

How to fix it: Build one that holds the ops of your configuration.

    $ python -m dsdoctor build-wheel --for ds_config.json

Since: 0.2""",
    "op-not-in-wheel": """A wheel does not hold an op that was asked for with `dsdoctor pick --op`.

Why it matters: On a machine with that wheel the op has to be compiled at run time, or fails there.

How to fix it: Choose another wheel, or build one that holds the op.

    $ python -m dsdoctor build-wheel --ops NAME

Since: 0.1""",
    "attestation-other-wheel": """The attestation that lies beside a wheel attests another file: the sha256 differ.

Why it matters: The wheel is not the one that its maker attested. It was changed, built again, or belongs to another
attestation.

How to fix it: Do not install it. Fetch the wheel and its attestation again, both from where they were published.

    $ gh attestation download WHEEL --repo OWNER/REPO

Since: 0.1""",
    "attestation-not-checked": """The attestation that lies beside a wheel attests this very wheel; its signature was not checked.

dsdoctor compares the sha256 and shows what the attestation says of its origin. It does not check the signature,
the certificate or the transparency log: that needs Sigstore's keys and a tool that knows them.

Why it matters: Without its signature an attestation is a text that anybody can write, and so is the repository
that it names.

How to fix it: Check the signature, for the repository from which you expect the wheel.

    $ gh attestation verify WHEEL --repo OWNER/REPO

Since: 0.1""",
    "attestation-unreadable": """A file beside a wheel has the name of its attestation and cannot be read as one.

It is damaged, too large, no file, or of a form that dsdoctor does not know.

Why it matters: Nothing attests where the wheel comes from.

How to fix it: Fetch the attestation again from where the wheel was published.

    $ gh attestation download WHEEL --repo OWNER/REPO

Since: 0.1""",
    "many-architectures": """GPU code is compiled for every architecture of torch's, because no GPU is seen and none was named.

Without a GPU nothing says which the wheel is for, so it is built for all that torch and nvcc share.

Why it matters: The time and the size of GPU code grow with each architecture.

How to fix it: Name the architectures, or give a snapshot of a machine that has the GPUs.

    $ python -m dsdoctor build-wheel --arch 9.0

Since: 0.1""",
    "not-proven": """An op could not be loaded on this machine, for a reason that says nothing about the op.

The NVIDIA driver's library is not here, or the op is compiled for a level above this processor (--cpu, --node) and
its import ended with SIGILL. Everything else about the op was tested.

Why it matters: That the op loads is not known until it is tried on a machine that has what it needs.

How to fix it: Load it on a machine with the driver and the processor that it is for.

    $ python -m dsdoctor verify --installed --load

Since: 0.1""",
    "variable-overridden": """A variable of your shell would steer a DeepSpeed build.

dsdoctor's own build does not see it: it sets its own variables, and the plan shows them.

Why it matters: `pip install` and compilation at run time do see it, and may build something else than dsdoctor
does.

How to fix it: Nothing needs to be done for this build. Unset the variable if you do not want it elsewhere.

    $ unset NAME

Since: 0.1""",
    "variable-reaches-nvcc": """nvcc itself reads NVCC_PREPEND_FLAGS and NVCC_APPEND_FLAGS, whoever starts it.

dsdoctor leaves them alone, because some sites need them.

Why it matters: Every op is compiled with these extra flags, and another machine without them gets another result.

How to fix it: Unset them if they are not meant for this build.

    $ unset NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS

Since: 0.1""",
    "cpu-not-on-node": """Host code was asked for that a machine named with --node cannot run.

Why it matters: The op would end with SIGILL there.

How to fix it: Leave --cpu away, and the level is the best that all nodes have. Or name a lower one, or build a
wheel for each kind of node.

Since: 0.1""",
    "cpu-above-this-machine": """Host code is compiled for a level that this machine does not have.

A compiler needs none of the instructions that it writes, so the wheel is built all the same.

Why it matters: Importing an op runs some of its code, which may end with SIGILL here. That the op loads is tested
only on a machine that has the level.

How to fix it: Nothing, if the wheel is for other machines; try it on one of them. For this machine leave --cpu and
--node away.

Since: 0.1""",
    "cpu-unknown-to-compiler": """The host compiler is older than the level that host code is to be compiled for.

The levels of x86-64 came with gcc 11 and clang 12, Arm's scalable vectors with gcc 10, armv9-a with gcc 12.

Why it matters: The compiler refuses the level, and no op is compiled.

How to fix it: Name a newer compiler with CC and CXX, or another level with --cpu.

Since: 0.1""",
    "arch-unused": """GPU architectures were named for a build that compiles no GPU code.

torch is a CPU build, or --accelerator cpu was given.

Why it matters: The wheel holds no op for a GPU.

How to fix it: For GPU ops, build for a CUDA build of torch, and without --accelerator cpu.

    $ python -m pip install torch

Since: 0.1""",
    "wheel-not-installed": """The wheel was built and tested, and pip could not install it.

The wheel is in the output folder.

Why it matters: The DeepSpeed in the environment is not the one that was built.

How to fix it: Install it by hand; pip says what it lacks.

    $ python -m pip install --no-deps --force-reinstall PATH/TO/THE.whl

Since: 0.1""",
    "ops-not-judged": """The ops were not judged: there was no DeepSpeed to judge, or the accelerator is neither CUDA nor a CPU.

Either no DeepSpeed is installed, none was named, and the newest could not be fetched. Or torch says that it was built for
ROCm or XPU, or a package gives it an NPU, an HPU, an MLU or an SDAA: dsdoctor knows nothing of ops for those.

Why it matters: The machine itself was examined, but not which ops can be built on it, or whether those of a wheel work.

How to fix it: Name a DeepSpeed: a folder, a source archive or a version. Where the run is meant for the CPU, say so.

    $ python -m dsdoctor check --source FOLDER
    $ DS_ACCELERATOR=cpu python -m dsdoctor check

Since: 0.1""",
    "check-broken": """One of dsdoctor's own checks failed with an error.

The other checks are not affected.

Why it matters: What this check looks for was not judged.

How to fix it: Report it, with the file that this command writes.

    $ python -m dsdoctor record FILE

Since: 0.1""",
    "usage": """The command makes no sense as given; the finding says what is wrong with it.

Why it matters: The command stopped before it did anything.

How to fix it: Correct the command. Its options are shown by --help.

    $ python -m dsdoctor --help

Since: 0.1""",
    "dsdoctor": """dsdoctor itself could not do its work; the finding says why.

Why it matters: Nothing is known about what the command was to find out or to make.

How to fix it: Remove the reason that the finding names (a full disk, a missing program, no network), and run the
command again.

Since: 0.1""",
}
