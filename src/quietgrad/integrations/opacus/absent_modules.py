"""Modules of Opacus that are not here, and what there is in their place."""

ONE_PROCESS = (
    "an Opacus script runs on one process here; several processes are one run in the loops of "
    "docs/loops.md (docs/many_processes.md)"
)
BY_AUTOGRAD = (
    "every layer's gradients by records are autograd's, made at optimizer.step(); let "
    "PrivacyEngine.make_private wrap the model"
)
ADAPTIVE = (
    "its threshold follows the share of clipped records, whose noise is not in this accountant; "
    "see quietgrad.beside.AdaptiveClipping in a loop of docs/loops.md"
)
CHOSEN = (
    "DPOptimizer is the optimiser of every way of clipping; let PrivacyEngine.make_private build it"
)
WHOLE = (
    "privacy-loss distributions are composed by create_accountant('prv'), whose step() and "
    "get_epsilon() take what is to be composed; single ones are dp_accounting.pld's"
)
TORCHS_LAYERS = "torch's own layers are trained, as they are"
VALIDATED = "ModuleValidator.validate and ModuleValidator.fix know these layers"

_LAYERS = (
    "conv",
    "dp_multihead_attention",
    "dp_rnn",
    "embedding",
    "embedding_norm_sample",
    "functorch",
    "group_norm",
    "gsm_base",
    "gsm_exp_weights",
    "gsm_no_op",
    "instance_norm",
    "layer_norm",
    "linear",
    "rms_norm",
)
MODULES = {
    **dict.fromkeys(
        (f"accountants.analysis.prv.{n}" for n in ("compose", "domain", "prvs")), WHOLE
    ),
    **dict.fromkeys((f"grad_sample.{layer}" for layer in _LAYERS), BY_AUTOGRAD),
    "grad_sample.grad_sample_module_fast_gradient_clipping_fsdp": ONE_PROCESS,
    "grad_sample.grad_sample_module_fast_gradient_clipping_tp": ONE_PROCESS,
    "layers.param_rename": TORCHS_LAYERS,
    "optimizers.adaclipoptimizer": ADAPTIVE,
    "optimizers.ddp_perlayeroptimizer": ONE_PROCESS,
    "optimizers.ddpoptimizer": ONE_PROCESS,
    "optimizers.ddpoptimizer_fast_gradient_clipping": ONE_PROCESS,
    "optimizers.fsdpoptimizer_fast_gradient_clipping": ONE_PROCESS,
    "optimizers.utils": CHOSEN,
    "utils.packed_sequences": f"{TORCHS_LAYERS}; torch.nn.utils.rnn is for packed sequences",
    **dict.fromkeys(
        (
            f"validators.{layer}"
            for layer in ("batch_norm", "gru", "instance_norm", "lstm", "multihead_attention")
        ),
        VALIDATED,
    ),
}
