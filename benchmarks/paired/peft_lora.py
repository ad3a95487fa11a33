import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model

model = get_peft_model(
    tiny.model(), LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
)
model.print_trainable_parameters()
torch.manual_seed(2)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
ids = torch.randint(3, 32, (4, 8))
for _ in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
model.save_pretrained("adapter")
again = PeftModel.from_pretrained(tiny.model(), "adapter").merge_and_unload()
print(
    again(input_ids=ids, labels=ids).loss.item().hex(),
    again.generate(ids[:1], max_new_tokens=4, do_sample=False).tolist(),
)
