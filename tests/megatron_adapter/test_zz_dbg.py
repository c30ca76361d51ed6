from tests.megatron_adapter.training_run import train_on_all_ranks
from tests.megatron_adapter import training_run
def before():
    from megatron.training import training
    old=training.setup_model_and_optimizer
    def new(*a,**k):
        r=old(*a,**k)
        import torch.distributed as dist
        if dist.get_rank()==0:
            with open('/work/scratch/params.txt','a') as f:
                for n,p in r[0][0].named_parameters(): f.write(f"{n} {float(p.double().abs().sum()):.10f}\n")
                f.write("--\n")
        return r
    training.setup_model_and_optimizer=new
def test_x(text_data):
    training_run.TINY_GPT_MOE = training_run.TINY_GPT_MOE.replace("--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none","").replace("--moe-token-dispatcher-type alltoall","")
    for n,extra in [(2,"--tensor-model-parallel-size 2 --moe-strategy none"),(2,"--tensor-model-parallel-size 2 --moe-strategy none --sequence-parallel")]:
        runs=train_on_all_ranks(n,f"--disable-bias-linear --train-iters 1 {extra}",text_data,before=before)
