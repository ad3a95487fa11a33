import tiny
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

lines = tiny.sentences(12)
rows = Dataset.from_dict({"prompt": lines, "chosen": lines[::-1], "rejected": [line + " w1" for line in lines]})
config = DPOConfig(
    output_dir="out",
    per_device_train_batch_size=2,
    max_steps=3,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    bf16=False,
    max_length=48,
    save_strategy="no",
    disable_tqdm=True,
    seed=3,
    gradient_checkpointing=False,
)
trainer = DPOTrainer(
    model=tiny.model(), ref_model=tiny.model(1), args=config, train_dataset=rows, processing_class=tiny.tokenizer()
)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(entry["step"], float(entry["loss"]).hex(), entry.get("rewards/margins"))
