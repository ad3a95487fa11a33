"""The manual pages of the rules of configurations."""

from collections.abc import Mapping

PAGES: Mapping[str, str] = {
    "config-key-misspelt": """A key of the configuration is none of DeepSpeed's, and one is spelt nearly like it.

DeepSpeed looks for each key of the top level, and of some sections, by name. What it does not know it leaves unread. Other
sections (zero_optimization, fp16, ...) are checked as a whole, and refuse it. Which keys there are is asked of the installed
DeepSpeed itself.

Why it matters: with a misspelt zero_optimization the training runs at stage 0, and nothing says so until memory is out.

How to fix it: write the key that is named; --fix does it.

    $ python -m dsdoctor config ds_config.json --fix corrected.json

Since: 0.1""",
    "config-key-misplaced": """A key stands in a section where DeepSpeed does not look for it, and it is one of another section.

Why it matters: on the top level it is silently ignored, in a section that is checked DeepSpeed refuses to start.

How to fix it: move it to where DeepSpeed looks; --fix does it.

    $ python -m dsdoctor config ds_config.json --fix corrected.json

Since: 0.1""",
    "config-key-ignored": """A key of the configuration is read by nobody, and no key of DeepSpeed is like it.

It may be one of an earlier or a later version, or one that another program reads. Names that begin with "_", "#", "//" or
"$" are taken for remarks.

Why it matters: what it should switch on is not switched on.

How to fix it: take it out, or look up in which version it came or went.

    $ python -m dsdoctor config ds_config.json --source 0.19.8

Since: 0.1""",
    "config-key-refused": """A section has a key that this DeepSpeed refuses there, and none of its keys is like it.

In the log of a training that failed by it the rule is config-key-unknown.

Why it matters: deepspeed.initialize stops, on every rank.

How to fix it: take it out, or use the DeepSpeed that knows it.

Since: 0.1""",
    "config-key-removed": """A key switches something on that this DeepSpeed no longer has.

DeepSpeed keeps a list of such keys, with what became of them; it is asked for it.

Why it matters: deepspeed.initialize stops, on every rank, after the model was loaded.

How to fix it: take it out; the message says what takes its place.

Since: 0.1""",
    "config-key-deprecated": """A key has a new name, or its meaning is told in another way now.

Why it matters: it works still, and a later release will refuse it. Together with the new one DeepSpeed refuses to start.

How to fix it: use the key that is named.

Since: 0.1""",
    "config-value-type": """A value is of another type than DeepSpeed wants.

Sections that are checked refuse it. Elsewhere DeepSpeed takes the value as it is: "false" in quotes is text, and text counts
as true; "10" in quotes is text until the first step computes with it. Which values are checked is asked of DeepSpeed.

Why it matters: the wrong thing is switched on, or the training fails at its first step, long after it was started.

How to fix it: numbers, true and false stand without quotes; --fix does it where the value is plain.

Since: 0.1""",
    "config-value-refused": """A value is outside of what DeepSpeed takes: too small, too large, or none of the words it knows.

In the log of a training that failed by it the rule is config-value-wrong.

Why it matters: deepspeed.initialize stops, on every rank.

How to fix it: the message says what is taken.

Since: 0.1""",
    "config-refused": """DeepSpeed refuses the configuration for keys that do not go together.

Those keys are named without each of which DeepSpeed takes the rest: each was taken out in turn, and DeepSpeed asked again. Some
refusals come only when the engine is made. So one is made, of a model with two parameters, by one rank on the CPU, without what
wants a GPU, several ranks, an NVMe disk or a compiled op; what fails there for another reason is not counted.

Why it matters: deepspeed.initialize stops, on every rank.

How to fix it: change one of the keys that are named.

Since: 0.1""",
    "config-two-precisions": """fp16 and bf16 are both enabled.

Why it matters: deepspeed.initialize stops, on every rank.

How to fix it: keep one. bf16 needs no loss scale, and GPUs of capability 8.0 or newer.

Since: 0.1""",
    "config-batch-missing": """The configuration says neither train_batch_size nor train_micro_batch_size_per_gpu.

Why it matters: deepspeed.initialize stops, on every rank.

How to fix it: set train_micro_batch_size_per_gpu to what one GPU takes at once. DeepSpeed computes the others.

Since: 0.1""",
    "config-batch-sizes-clash": """The batch sizes do not fit each other, or not the number of ranks.

train_batch_size is train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks. Ranks that share a
model (tensor, pipeline, sequence parallelism) count as one. In a log the rule is config-batch-sizes.

Why it matters: deepspeed.initialize stops, on every rank.

How to fix it: leave train_batch_size out, and DeepSpeed computes it.

Since: 0.1""",
    "config-batch-one-world": """All three batch sizes are given, so the configuration fits one number of ranks only.

Why it matters: on another number of GPUs deepspeed.initialize stops.

How to fix it: leave train_batch_size out, where the same file is to serve several sizes.

Since: 0.1""",
    "config-auto-for-trainer": """Values are "auto", and nobody was named who fills them in.

"auto" is no value of DeepSpeed. transformers' Trainer and accelerate put numbers in its place, before they make the engine.

Why it matters: a script that calls deepspeed.initialize itself gets defaults for some of them, and text for the others.

How to fix it: name the Trainer's arguments or accelerate's file, and each value is told and judged.

    $ python -m dsdoctor config ds_config.json --hf training_args.json

Since: 0.1""",
    "config-auto-stays": """A value is "auto", nobody fills it in, and for DeepSpeed it is text.

Why it matters: the training fails where DeepSpeed computes with it: at once, or at its first step.

How to fix it: give it a value.

Since: 0.1""",
    "config-auto-dropped": """A value is "auto", nobody fills it in, and DeepSpeed takes its default.

Sections that are checked drop every "auto" without a word. "stage": "auto" is stage 0.

Why it matters: the training is another one than was meant, and nothing says so.

How to fix it: give it a value.

Since: 0.1""",
    "config-optimizer-unknown": """The optimizer that is named is neither one of DeepSpeed's nor a class of torch.optim.

DeepSpeed's own are known in any case of letters, torch's as they are written.

Why it matters: deepspeed.initialize stops, on every rank, after the model was loaded.

How to fix it: write the name that is meant, or make the optimizer in the program.

Since: 0.1""",
    "config-optimizer-parameter": """A parameter of the optimizer is one that it does not take, or has such a value.

The optimizer is made by DeepSpeed's own code of the parameters that the file gives, with its compiled op left out.

Why it matters: deepspeed.initialize stops; Muon drops what it does not know without a word.

How to fix it: write the parameter that is named.

Since: 0.1""",
    "config-optimizer-refused": """DeepSpeed refuses the optimizer together with the rest of the configuration.

Why it matters: deepspeed.initialize stops, on every rank, after the model was loaded.

How to fix it: the message says what is missing; for an optimizer that was not tried with ZeRO that is
"zero_allow_untested_optimizer": true.

Since: 0.1""",
    "config-scheduler-unknown": """The scheduler that is named is neither one of DeepSpeed's nor one of torch.optim.lr_scheduler.

Why it matters: deepspeed.initialize stops, on every rank, after the optimizer was made.

How to fix it: DeepSpeed's are LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR and WarmupCosineLR.

Since: 0.1""",
    "config-scheduler-parameter": """A parameter of the scheduler is one that it does not take, or has such a value.

Why it matters: deepspeed.initialize stops, on every rank, after the optimizer was made.

How to fix it: write the parameter that is named.

Since: 0.1""",
    "config-scheduler-refused": """DeepSpeed cannot make the scheduler: a parameter is missing, or its params are.

Why it matters: deepspeed.initialize stops, on every rank, after the optimizer was made.

How to fix it: add what the message names. WarmupDecayLR and WarmupCosineLR need total_num_steps.

Since: 0.1""",
    "config-scheduler-metric": """The scheduler goes by a measured value, such as the loss, which DeepSpeed does not hand on.

Why it matters: DeepSpeed calls the scheduler's step() without arguments, and where that fails with the size of the train batch.
ReduceLROnPlateau takes that number for its metric: it never gets better, and the learning rate falls again and again.

How to fix it: call engine.step(lr_kwargs={"metrics": loss}) in the program, or name another scheduler.

Since: 0.1""",
    "config-own-optimizer-offload": """The optimizer's states are to go to the host, and the file names no optimizer.

The program then brings its own. DeepSpeed takes DeepSpeedCPUAdam and DeepSpeedCPULion, and refuses others, unless
zero_force_ds_cpu_optimizer is false. What the program brings cannot be seen here.

Why it matters: with torch's AdamW deepspeed.initialize stops.

How to fix it: name the optimizer in the file, or make DeepSpeed's in the program.

Since: 0.1""",
    "config-offload-ignored": """Offload that this ZeRO stage does not do, or with keys that are not read for its device.

offload_param and NVMe are for stage 3, offload_optimizer is for stages 1 to 3. pipeline_read, buffer_count and their like are
read for NVMe only, super_offload at stage 3 only.

Why it matters: the memory that was to be saved is not saved. At stage 0 with offload_optimizer DeepSpeed makes its optimizer
for the CPU all the same, and that one's first step refuses parameters on a GPU.

How to fix it: set the stage that is meant.

Since: 0.1""",
    "config-nvme-without-path": """Offload to NVMe is asked for, and no folder is named for it.

Why it matters: deepspeed.initialize fails, on every rank, with a TypeError that does not name the key.

How to fix it: set nvme_path to a folder on a local NVMe disk.

Since: 0.1""",
    "config-nvme-folder-absent": """The folder for NVMe offload is not there on this machine.

Why it matters: DeepSpeed makes the folder where it is missing: if the disk is not mounted, the swap files fill the disk of
the system.

How to fix it: mount the disk, on every node.

    $ df -h

Since: 0.1""",
    "config-precision-unsupported": """fp16 or bf16 is switched on, and the GPUs have no arithmetic for it.

DeepSpeed refuses fp16 below capability 7.0. bf16 came with capability 8.0; below it torch computes it by way of fp32.

Why it matters: deepspeed.initialize stops, or the training is slow.

How to fix it: take the precision that the GPUs have.

Since: 0.1""",
    "config-stage-ignores": """Keys of zero_optimization are set that the ZeRO stage does not read.

At which stage DeepSpeed reads which key is parsed from its own source: one branch of its engine is for stages 1 and 2, one
for stage 3. Only keys that have another value than their default are told.

Why it matters: often another stage was meant.

How to fix it: set the stage that is meant, or take the keys out.

Since: 0.1""",
    "config-bucket-larger-than-model": """The bucket in which gradients are reduced is larger than the whole model.

Its default is 5e8 elements. Stage 3 allocates all of it when it starts, for each dtype of the model.

Why it matters: a gigabyte of every GPU is taken for nothing, and DeepSpeed's memory estimates do not count it.

How to fix it: set reduce_bucket_size; the Trainer takes the square of the hidden size.

Since: 0.1""",
    "config-ops-not-built": """The configuration loads ops that the installed DeepSpeed holds no compiled form of.

Why it matters: they are compiled when the training starts, which takes minutes, a compiler and a CUDA toolkit, on every node.

How to fix it: install a DeepSpeed that has them.

    $ python -m dsdoctor install --for ds_config.json

Since: 0.1""",
    "config-trainer-mismatch": """A value of the file is another than that of TrainingArguments.

Compared by transformers' own functions, which the Trainer calls.

Why it matters: the Trainer refuses to train, after the model was loaded.

How to fix it: write "auto" into the file, and TrainingArguments alone decides.

Since: 0.1""",
    "config-trainer-refuses": """transformers or accelerate refuses the configuration before DeepSpeed sees it.

Why it matters: no training begins, on any rank.

How to fix it: correct what the message names; it is theirs, word for word.

Since: 0.1""",
    "config-not-plain-json": """The file is Hjson, and transformers and accelerate read JSON.

DeepSpeed reads comments and names without quotes; they fail on them.

Why it matters: no training begins: json.decoder.JSONDecodeError.

How to fix it: write plain JSON.

Since: 0.1""",
    "config-accelerate-without-file": """accelerate's configuration does not lead to the file that is judged.

Without deepspeed_config_file accelerate makes a DeepSpeed configuration of its own: stage 2 if nothing else is said.

Why it matters: the training does something else than this file says.

How to fix it: name the file in accelerate's configuration.

    $ accelerate config

Since: 0.1""",
    "config-accelerate-other-file": """accelerate's configuration names another DeepSpeed file than the one that is judged.

Why it matters: what was found here is not about the training that accelerate starts.

How to fix it: judge the file that accelerate names.

Since: 0.1""",
    "config-not-judged": """A part of the configuration could not be asked about.

Why it matters: what is wrong in that part was not seen.

How to fix it: correct what else is named, name the training's Python with --python, and judge it again.

Since: 0.1""",
}
