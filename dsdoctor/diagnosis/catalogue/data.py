"""Rules of the data: files that are no table, empty data sets, columns that the model does not take, text encodings."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier

DATASET_UNREADABLE = Rule(
    id="dataset-unreadable",
    stage=Stage.RUN,
    title="datasets cannot make a table of the data: {words}",
    fix="look at the exception above it, which names the file or the column: every record must have the same keys, "
    "with values of one "
    "type (no number here and text there, no list here and object there); load one file after the other to find it",
    steps=(
        step("head -c 400 DATA.jsonl"),
        instead("export HF_DATASETS_CACHE=/tmp/datasets", note="a new cache, where the old one broke off"),
    ),
    manual="""Hugging Face's datasets reads files into tables of Arrow, whose columns have one type each.

Records with other keys or types, a file that is no JSON or JSON lines, a download that broke off, or a cache that
another process was writing end in such an error.

Why it matters: There is no data to train on.""",
    signatures=(
        Signature(
            words="arrowinvalid+json jsonl+parse arrowinvalid+parse",
            pattern=r"ArrowInvalid: (?P<words>JSON parse error: .{1,120})",
            title="a JSON file of the data set cannot be read as a table: {words}",
            sample="pyarrow.lib.ArrowInvalid: JSON parse error: Column() changed from object to array in row 0",
        ),
        Signature(
            words="arrowinvalid+overflow",
            pattern=r"ArrowInvalid: (?P<words>offset overflow while concatenating arrays)",
            title="a column of the data set is too large for one batch of the writer (2 GB): {words} (pyarrow)",
            fix="write smaller batches: writer_batch_size=100 or less in map and load_dataset; cut very long records",
            sample="pyarrow.lib.ArrowInvalid: offset overflow while concatenating arrays",
        ),
        Signature(
            words="arrowinvalid arrowtypeerror arrownotimplementederror arrowkeyerror",
            pattern=r"^(?:pyarrow\.lib\.)?Arrow(?:Invalid|TypeError|NotImplementedError|KeyError): (?!JSON "
            r"parse|offset overflow)"
            r"(?P<words>.{1,160})",
            tier=Tier.GENERIC,
            sample="pyarrow.lib.ArrowTypeError: Expected bytes, got a 'int' object",
        ),
        Signature(
            words="generating+dataset datasetgenerationerror datasetgenerationcasterror",
            pattern=r"DatasetGeneration(?:Cast)?Error: (?P<words>.{1,120})",
            tier=Tier.GENERIC,
            sample="datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset",
        ),
        Signature(
            words="column+names+match",
            pattern=r"because column names don't match",
            tier=Tier.GENERIC,
            title="files of one data set have other columns (column names) than the first",
            sample="because column names don't match",
        ),
        Signature(
            words="datafilesnotfounderror datasetnotfounderror emptydataseterror",
            pattern=r"(?:DataFilesNotFound|DatasetNotFound|EmptyDataset)Error: (?P<words>.{1,160})",
            title="the data set was not found: {words}",
            fix="correct its name or path (it counts from the folder in which the ranks run); a private or gated one "
            "needs a login, and "
            "without a network it must be in the cache (HF_HOME) of every node",
            steps=(step("ls -l DATA"),),
            sample="datasets.exceptions.DatasetNotFoundError: Dataset 'me/data' doesn't exist on the Hub or cannot be "
            "accessed.",
        ),
        Signature(
            words="undefined+dataset_info",
            pattern=r"ValueError: (?P<words>Undefined dataset .{1,80} in \S{0,80}dataset_info\.json)",
            title="LLaMA-Factory does not know the data set: {words}",
            fix="add an entry for it to dataset_info.json (in --dataset_dir), or correct the name",
            steps=(step("ls data/dataset_info.json"),),
            sample="ValueError: Undefined dataset mydata in dataset_info.json.",
        ),
    ),
)

DATASET_EMPTY = Rule(
    id="dataset-empty",
    stage=Stage.RUN,
    title="the data set is empty: nothing is left to train on",
    fix="see how many records are left after each filter and each cut: a wrong path, split or column name, texts that "
    "are all longer "
    "than the limit, or a max_samples of 0",
    manual="""A sampler was to draw from a data set of length 0.

Why it matters: The data loader cannot be made.""",
    signatures=(
        Signature(
            words="num_samples+positive",
            pattern=r"ValueError: num_samples should be a positive integer value, but got num_samples=0",
            sample="ValueError: num_samples should be a positive integer value, but got num_samples=0",
        ),
        Signature(
            words="dataset+empty cannot+find+samples find+valid+samples",
            pattern=r"(?:Value|Runtime|Assertion)Error: (?:Cannot find (?:valid|sufficient) samples|The "
            r"(?:train(?:ing)? )?dataset is empty"
            r"|Dataset is empty)",
            sample="RuntimeError: Cannot find valid samples, check `data/README.md` for the data format.",
        ),
    ),
)

DATASET_COLUMNS = Rule(
    id="dataset-columns",
    stage=Stage.RUN,
    title="the batches do not have what the model's forward takes: {words|columns were dropped, or have other names}",
    fix="tokenize the data to input_ids, attention_mask and labels, with labels for training; "
    "remove_unused_columns=False in the "
    "TrainingArguments keeps the columns for a collate function of your own",
    manual="""The Trainer drops the columns that the model's forward has no argument for, and hands the others to it.

A model gives a loss only if it gets labels. A data set of text has to be tokenized before.

Why it matters: The first step fails.""",
    signatures=(
        Signature(
            words="return+loss+inputs",
            pattern=r"ValueError: The model did not return a loss from the inputs",
            title="the model gives no loss: its inputs have no labels",
            sample="ValueError: The model did not return a loss from the inputs, only the following keys: logits.",
        ),
        Signature(
            words="columns+signature+forward columns+dataset+match",
            pattern=r"ValueError: No columns in the dataset match the model's forward method signature",
            sample="ValueError: No columns in the dataset match the model's forward method signature. The following "
            "columns have been "
            "ignored: [text].",
        ),
        Signature(
            words="supply+encoding+input_ids",
            pattern=r"ValueError: You should supply an (?:encoding|instance) .{0,160}input_ids.{0,40}, but you "
            r"provided (?P<words>.{1,80})",
            title="the batch to be padded has no input_ids, only {words}: the columns were dropped "
            "(remove_unused_columns) or not tokenized",
            sample="ValueError: You should supply an encoding or a list of encodings to this method that includes "
            "input_ids, but you "
            "provided ['label']",
        ),
    ),
)

TEXT_ENCODING_WRONG = Rule(
    id="text-encoding-wrong",
    stage=Stage.RUN,
    title="a file is read as text of the wrong encoding ('{codec}' cannot {what} it)",
    fix="open it with encoding='utf-8' (on Windows set PYTHONUTF8=1), or convert the file; bytes like 0x1f 0x8b or "
    "0x80 at its start are "
    "no text at all, but a compressed file or a pickle",
    steps=(step("export PYTHONUTF8=1"), instead("set PYTHONUTF8=1", note="Windows"), step("file DATA")),
    manual="""Python reads text in the encoding of the system unless it is told one: cp1252 or gbk on Windows,
ASCII in a bare container.

Why it matters: The file cannot be read.""",
    signatures=(
        Signature(
            words="unicodedecodeerror unicodeencodeerror",
            pattern=r"^Unicode(?:De|En)codeError: '(?P<codec>[\w-]{2,20})' codec can't (?P<what>decode|encode)",
            tier=Tier.GENERIC,
            sample="UnicodeDecodeError: 'gbk' codec can't decode byte 0x80 in position 22: illegal multibyte sequence",
        ),
    ),
)

RULES = (DATASET_UNREADABLE, DATASET_EMPTY, DATASET_COLUMNS, TEXT_ENCODING_WRONG)
