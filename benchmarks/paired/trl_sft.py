import tiny
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

config = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=2,
    max_steps=3,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    bf16=False,
    max_length=32,
    save_strategy="no",
    disable_tqdm=True,
    seed=3,
    gradient_checkpointing=False,
)
trainer = SFTTrainer(
    model=tiny.model(),
    args=config,
    train_dataset=Dataset.from_dict({"text": tiny.sentences()}),
    processing_class=tiny.tokenizer(),
)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(entry["step"], float(entry["loss"]).hex(), entry.get("mean_token_accuracy"))
