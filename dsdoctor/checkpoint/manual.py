"""The manual pages of the rules of checkpoints."""

from collections.abc import Mapping

PAGES: Mapping[str, str] = {
    "checkpoint-no-tags": """A folder holds no checkpoint of DeepSpeed.

A checkpoint is a folder of tags (global_step500), each with files like mp_rank_00_model_states.pt, and a file latest beside them
that names one. Weights that save_pretrained wrote are something else: they hold no optimizer states.

Why it matters: load_checkpoint of such a folder returns (None, None) or fails, and what was trained is not taken up.

How to fix it: name the folder that save_checkpoint was given.

Since: 0.1""",
    "checkpoint-latest-missing": """A folder of tags has no file latest.

save_checkpoint writes it last, when every rank has saved. It is missing where the first save was cut off, where tags were
copied without it, or where save_latest=False was given.

Why it matters: load_checkpoint(DIR) then warns in the log, returns (None, None) and raises nothing: the training begins anew
from step 0.

How to fix it: write it from the newest tag that is complete, or name the tag in load_checkpoint.

    $ python -m dsdoctor checkpoint DIR --repair

Since: 0.1""",
    "checkpoint-latest-wrong": """The file latest names a tag that is not there.

Why it matters: load_checkpoint(DIR) fails with an AssertionError that says nothing.

How to fix it: write it from the newest tag that is complete, or name the tag in load_checkpoint.

    $ python -m dsdoctor checkpoint DIR --repair

Since: 0.1""",
    "checkpoint-latest-absolute": """The file latest holds a whole path, not the name of a tag.

DeepSpeed joins the folder and what latest says; a whole path wins over the folder.

Why it matters: it is found as long as the folder stays where it is. A copy elsewhere loads from the old place, or fails.

How to fix it: let latest hold the tag's name alone.

Since: 0.1""",
    "checkpoint-needs-classes": """A file of a tag holds objects of classes that DeepSpeed and torch do not bring.

client_state may hold anything, and torch pickles an object with the name of its class: a dataclass of the training script, a
configuration of another library.

Why it matters: load_checkpoint fails with an AttributeError or ModuleNotFoundError in a script that does not have the class, also
after the class was renamed or moved.

How to fix it: load it in a script that can import them; save numbers, lists and dictionaries in client_state instead.

Since: 0.1""",
    "checkpoint-frozen-excluded": """A checkpoint was saved with exclude_frozen_parameters: it holds the trained ones only.

Hugging Face's Trainer does so for adapters (PEFT): the base model is loaded from elsewhere anyway. Told at stages 2 and 3, where
DeepSpeed notes it. Below, it is told where a LoRA adapter stands there without the layer that it adapts, or a second name of a
parameter without the first; else a checkpoint without them looks like one of a model that has none, and the verdict says so.

Why it matters: a plain load_checkpoint then fails with "Missing key(s) in state_dict", and a merged model lacks them. With
load_module_strict=False it loads without a word, and the frozen parameters stay as the model was made: where no base model was
loaded before, they are random.

How to fix it: load the base model first, and then load_checkpoint(..., load_module_strict=False).

Since: 0.1""",
    "checkpoint-universal-leaves": """A universal checkpoint brings back what the optimizer trains, and nothing else.

DeepSpeed 0.19.8 loads the module of no universal checkpoint: frozen parameters and buffers (such as BatchNorm's statistics) stay
as the model was made, whether they were saved or not, and load_module_strict changes nothing about it.

Why it matters: it raises nothing and says nothing. A frozen base model that was not loaded before is random then.

How to fix it: load them into the model before deepspeed.initialize: of the base model, or of what the tag merges into.

    $ python -m dsdoctor checkpoint DIR --tag TAG --merge OUT

Since: 0.2""",
    "checkpoint-leftover-shards": """A tag has files of ranks, of a stage or of a type that the run which saved last did not have.

A larger run, or one of another stage or type (a run in bf16 puts bf16_ before the names of its optimizer's files), saved under the
same tag in the same folder before, or somebody copied files. Rank 0's files say how many ranks the last one had, the optimizer's at
which stage it was, and the configuration in the model's whether it trained in bf16.

Why it matters: load_checkpoint opens only the files of its own ranks. zero_to_fp32.py takes every file by its name, and fails or
puts weights of two runs together.

How to fix it: move them away before zero_to_fp32.py runs. dsdoctor checkpoint --merge leaves them out.

Since: 0.1""",
    "checkpoint-file-damaged": """A file of a tag is not whole: it is empty, cut off, or its parts do not fit each other.

A file of torch.save is a zip, with its directory at the end. A disk that runs full, or a job that is killed while it saves,
leaves one without that end. Read are the directory, and the pickle that names the tensors and their sizes; nothing of it is run.

Why it matters: the ranks that read it fail, while the others wait for them or say that they have loaded.

How to fix it: take an older tag, or copy the file anew from where it is whole.

Since: 0.1""",
    "checkpoint-file-ambiguous": """The zip of a file can be read in two ways, and readers see different contents in it.

A zip says everything twice: in the directory at its end and in the header before each entry, in an end record and in a zip64 record
to which a locator points. torch follows the locator and looks at no case in names; other readers do not. dsdoctor takes a file only
where all of it agrees and no byte is left over: one directory, each entry once, one after the other, each header as the directory
says.

Why it matters: such a file is not one that torch.save wrote. It may show harmless contents to whoever looks into it, and hand
torch.load another pickle, which runs whatever program it names.

How to fix it: do not load it. Copy it anew from whoever saved it, and compare the digests (sha256sum) on both sides.

Since: 0.2""",
    "checkpoint-shard-missing": """A file that the other files of a tag speak of is not there.

They say how many ranks there were, which parameters, which experts and which layers of a pipeline. On several nodes without a
shared disk each node has the files of its own ranks only.

Why it matters: the rank whose file is gone fails; another one may have loaded already, and waits.

How to fix it: take an older tag, or copy the files from the nodes that wrote them into one folder.

Since: 0.1""",
    "checkpoint-shards-mixed": """The files of a tag are not of one save, or one stands in another's place.

They name other steps, ranks or parameters. torch writes into each file the name under which it was saved, the optimizer counts its
steps, and each file says of how many ranks it is one.

Why it matters: most such mixtures load without an error, and the training goes on from weights that never were.

How to fix it: take a tag whose files are of one save.

Since: 0.1""",
    "checkpoint-sizes-differ": """The weights in the ranks' files together have more or fewer elements than the parameters.

Reckoned as DeepSpeed does it, padding included.

Why it matters: loading fails, or parameters get the values of others.

How to fix it: take a tag whose files are of one save.

Since: 0.1""",
    "checkpoint-not-read": """Of a file in a tag nothing is said: its form is not read here, or it may not be read by you.

Files of torch before 1.6 are no zip. A file with another content than torch and DeepSpeed write is not interpreted.

Why it matters: what is wrong in it is not seen here.

How to fix it: let a rank load it.

Since: 0.1""",
    "checkpoint-not-yours": """You may not read files of a tag.

Saved by another user, or by root in a container, with rights for that user alone.

Why it matters: load_checkpoint fails with a PermissionError on the ranks that read them, and others may have loaded already.

How to fix it: start the training as the user who saved it, or let that user give the right to read.

    $ ls -l DIR/TAG

Since: 0.1""",
    "checkpoint-frozen-left-out": """zero_to_fp32.py leaves frozen parameters of this checkpoint out.

At stage 1 DeepSpeed saves frozen parameters with the model only, and not where zero_to_fp32.py looks for them.

Why it matters: the merged file has no values for them; loaded with strict=False the model keeps those that it was made with.
load_checkpoint is not concerned.

How to fix it: merge it with dsdoctor, which takes them from the model states.

    $ python -m dsdoctor checkpoint DIR --merge OUT

Since: 0.1""",
    "checkpoint-newest-incomplete": """A tag is newer than the one that would be loaded, and is not complete.

Why it matters: the last save was cut off. What was trained since the tag before it is lost.

How to fix it: nothing has to be done to load the older one. --repair gives the incomplete one another name; it deletes nothing.

    $ python -m dsdoctor checkpoint DIR --repair

Since: 0.1""",
    "checkpoint-newer-tag": """A tag of a later step than the one that latest names is there and complete, or you may not read it.

Of one that belongs to another user no more is known than the step in its name.

Why it matters: load_checkpoint(DIR) does not take it.

How to fix it: name the tag, if it is the one you want.

Since: 0.1""",
    "checkpoint-optimizer-skipped": """load_checkpoint is called so that it leaves the optimizer out, and says nothing of that.

load_optimizer_states=False takes the weights, the step and the schedule of the learning rate. load_module_only=True takes the
weights alone. Below stage 3 the optimizer's files are not even opened.

Why it matters: Adam begins with moments of zero, as at the first step: the loss jumps, and a long training loses what it had
learned about its gradients. In bf16 the fp32 weights are those of the model, rounded.

How to fix it: leave the argument out where a training is to go on. For a fine-tuning from the weights it is right.

Since: 0.1""",
    "checkpoint-weights-of-latest": """A tag is named, and load_checkpoint takes the weights of another one.

At stage 3 load_optimizer_states=False puts the weights together with the function of zero_to_fp32.py, and calls it with the folder
alone: it takes the tag that the file latest names, also where load_checkpoint was given another one. Without the file it fails.

Why it matters: the step and the schedule are those of the tag that was named, and the weights are not.

How to fix it: let latest name the tag for this load, or merge the tag and load its weights into the model.

    $ python -m dsdoctor checkpoint DIR --tag TAG --merge OUT

Since: 0.1""",
    "checkpoint-weights-undone": """A load without the optimizer is undone by the first step.

Without ZeRO, in bf16, the optimizer keeps fp32 weights of its own. load_optimizer_states=False loads the model's weights and leaves
those as the model was made; each step writes them into the model.

Why it matters: the loss is right until the first step, and then that of a model that was never trained.

How to fix it: load with load_module_only=True, which makes the fp32 weights anew of the model's, or train at stage 1.

Since: 0.1""",
    "checkpoint-needs-universal": """The planned run has another number of ranks, or another type, than the one that saved.

DeepSpeed cuts the optimizer's states up for each rank, and does not cut them anew while it loads. A universal checkpoint holds
each parameter's states whole.

Why it matters: load_checkpoint fails on every rank, after the model was built.

How to fix it: convert it once, and set "checkpoint": {"load_universal": true} for the run.

    $ python -m dsdoctor checkpoint DIR --tag TAG --universal DIR/TAG_universal

Since: 0.1""",
    "checkpoint-cannot-load": """The planned run cannot load this checkpoint, not by a universal one either.

Between no ZeRO, the stages 1 and 2, and stage 3, files have other names and other contents. The table behind this verdict is
compared with real ranks of DeepSpeed 0.19.8.

Why it matters: load_checkpoint fails on every rank, after the model was built.

How to fix it: train on with the settings that it was saved with, or begin anew from its weights alone.

    $ python -m dsdoctor checkpoint DIR --merge OUT

Since: 0.1""",
    "checkpoint-load-not-known": """Whether the planned run can load this checkpoint was never tried here.

Why it matters: a guess would cost more than a short run.

How to fix it: start one short run with the planned settings, and call load_checkpoint.

Since: 0.1""",
    "checkpoint-bytes-changed": """A file holds other bytes than torch wrote: a checksum of its zip is another one.

torch writes a checksum for each tensor and does not look at it when it loads.

Why it matters: the tensor loads without a word, with a value that was never trained. One flipped bit of an exponent is enough
for a loss of nan some steps later.

How to fix it: copy the file anew from where it is right, or take an older tag. Then look at the disk and its controller: what
changed one byte changes another.

Since: 0.1""",
    "checkpoint-not-finite": """A weight or an optimizer state of the checkpoint is nan or inf.

Buffers are not judged: a mask may be -inf in health. Padding between parameters is not judged either.

Why it matters: a training that goes on from it stays nan from the first step.

How to fix it: take an older tag. To find out where the first one came from, watch a run from that tag.

    $ python -m dsdoctor.run train.py

Since: 0.1""",
    "checkpoint-values-disagree": """Weights of the model are not the fp32 weights of the optimizer, rounded to the model's type.

At the stages 1 and 2 each weight is saved twice: in the model's own type, and in fp32 in the optimizer's files. After each step the
one is made of the other. They differ where a file is of another training, or where a script changed weights in place after the
last step (averaging, merging an adapter). With fp16, and at stage 3, where each weight is saved once, nothing is compared.

Why it matters: load_checkpoint takes both without a word, and the fp32 weights replace the model's with the next step: the training
goes on from weights of two trainings.

How to fix it: take a tag whose files are of one save. Where a script changed the weights on purpose, nothing has to be done but to
know that the optimizer does not have the change.

Since: 0.1""",
    "checkpoint-model-differs": """The checkpoint's parameters are not those of the model that was named with --model.

The model is built of its configuration without memory for its weights, by the installed transformers; names and shapes are
compared. Told are parameters that the model has and the checkpoint does not, those that only the checkpoint has, and other shapes.

Why it matters: load_checkpoint fails with "Missing key(s)" or "size mismatch" on every rank, after the model was built; with
load_module_strict=False parameters keep the values that they were made with, and nothing is said.

How to fix it: load it into the model that it was written from: the same layers, vocabulary and wrappers (LoRA, compile).

Since: 0.1""",
    "checkpoint-nothing-loaded": """load_checkpoint returned (None, None) in a watched training: nothing was loaded.

The folder is not there, or it has no file latest and no tag was named. DeepSpeed writes one line into its log and raises nothing.

Why it matters: the training begins anew from step 0, and may write over what it was to go on from.

How to fix it: look at the folder, and test what load_checkpoint returns: path is None.

    $ python -m dsdoctor checkpoint DIR

Since: 0.1""",
    "checkpoint-save-failed": """save_checkpoint raised an error in a watched training.

The file that was written at that moment is cut off, and others of the tag are missing. latest is written last: it names the tag
before this one still.

Why it matters: the tag cannot be loaded, and takes room. A training that catches the error goes on without a checkpoint.

How to fix it: make room where the disk was full. --repair gives the tag that was cut off another name and deletes nothing.

    $ python -m dsdoctor checkpoint DIR

Since: 0.1""",
    "checkpoint-disk-full": """In a watched training a checkpoint was saved, and the disk has no room for another of its size.

Why it matters: the next save fails in the middle, and leaves a tag that cannot be loaded.

How to fix it: make room, or keep fewer tags.

    $ df -h DIR

Since: 0.1""",
    "checkpoint-host-memory": """The ranks of a machine read more into its memory than there is.

Each rank reads a whole file of model states, and then its optimizer states. What is told is the least: the larger of both
files, for each rank.

Why it matters: the system kills a rank while it loads, with nothing but "Killed" or signal 9.

How to fix it: load on a machine with more memory, or with fewer ranks on each.

Since: 0.1""",
}
