//! A layer of the text model: attention, then a feed-forward half, alone or beside a mixture of experts, then what the layer takes
//! in of the token itself.

use mlx_rs::{Array, fast, ops};

use super::{
    super::{
        Linear, RmsNorm,
        experts::Experts,
        layers::{self, Activation, GatedMlp},
        rope::{Rope, RopeOptions},
    },
    config::{KeysOf, LayerSizes, MixtureSizes, TextConfig},
};
use crate::engine::{
    EngineError,
    cache::{Cache, LayerLayout, Step},
    ffi,
    models::ExpertLinear,
    weights::{Loader, WeightError},
};

pub struct Layer {
    input_norm: RmsNorm,
    attention: Attention,
    post_attention_norm: RmsNorm,
    feedforward_norm: RmsNorm,
    mlp: GatedMlp,
    mixture: Option<Mixture>,
    post_feedforward_norm: RmsNorm,
    per_layer_input: Option<PerLayerInput>,
    /// (1)
    layer_scalar: Array,
}

struct Attention {
    q_proj: Linear,
    q_norm: RmsNorm,
    keys: Keys,
    o_proj: Linear,
    rope: Rope,
    heads: i32,
    head_dim: i32,
}

enum Keys {
    Own {
        k_proj: Linear,
        /// None where values are made of the product for keys, before its norm.
        v_proj: Option<Linear>,
        k_norm: RmsNorm,
        layout: LayerLayout,
        kept: bool,
    },
    /// An earlier layer's.
    Of(usize),
}

/// What a layer takes of a mixture of experts, beside its own feed-forward half.
struct Mixture {
    router: Linear,
    /// The router's scale (hidden), times hidden^-½.
    router_norm: RmsNorm,
    /// (experts)
    per_expert_scale: Array,
    taken: i32,
    experts: Experts,
    post_mlp_norm: RmsNorm,
    input_norm: RmsNorm,
    output_norm: RmsNorm,
}

struct PerLayerInput {
    gate: Linear,
    projection: Linear,
    norm: RmsNorm,
}

impl Layer {
    pub fn load(config: &TextConfig, sizes: LayerSizes, index: usize, loader: &mut Loader) -> Result<Self, WeightError> {
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let module = |name: &str| format!("model.layers.{index}.{name}");
        let norm = |loader: &mut Loader, name: &str| loader.rms_norm(&module(name), hidden, eps);
        let attention = Attention::load(config, sizes, &module("self_attn"), index, loader)?;
        let mixture = config.mixture().map_err(WeightError::Config)?;
        let width = config.per_layer_inputs();
        Ok(Self {
            input_norm: norm(loader, "input_layernorm")?,
            attention,
            post_attention_norm: norm(loader, "post_attention_layernorm")?,
            feedforward_norm: norm(loader, "pre_feedforward_layernorm")?,
            mlp: GatedMlp::load(loader, &module("mlp"), hidden, sizes.intermediate, false, Activation::GeluTanh)?,
            mixture: mixture.map(|mixture| Mixture::load(config, mixture, &module, loader)).transpose()?,
            post_feedforward_norm: norm(loader, "post_feedforward_layernorm")?,
            per_layer_input: match width {
                0 => None,
                width => Some(PerLayerInput {
                    gate: loader.linear(&module("per_layer_input_gate"), hidden, width, false)?,
                    projection: loader.linear(&module("per_layer_projection"), width, hidden, false)?,
                    norm: norm(loader, "post_per_layer_input_norm")?,
                }),
            },
            layer_scalar: loader.tensor(&module("layer_scalar"), &[1])?,
        })
    }

    /// What the cache keeps for this layer; none where it looks up another's.
    pub fn layout(&self) -> Option<LayerLayout> {
        match &self.attention.keys {
            Keys::Own { layout, .. } => Some(*layout),
            Keys::Of(_) => None,
        }
    }

    /// (N, hidden) -> (N, hidden), with the layer's own part (N, width) of the per-layer inputs.
    pub fn forward(
        &self,
        x: &Array,
        per_layer_input: Option<&Array>,
        index: usize,
        step: &Step,
        cache: &mut Cache,
    ) -> Result<Array, EngineError> {
        let attended = self.attention.forward(&self.input_norm.forward(x)?, index, step, cache)?;
        let hidden = x.add(self.post_attention_norm.forward(&attended)?)?;
        let mut fed = self.mlp.forward(&self.feedforward_norm.forward(&hidden)?)?;
        if let Some(mixture) = &self.mixture {
            fed = mixture.forward(&hidden, &fed)?;
        }
        let mut hidden = hidden.add(self.post_feedforward_norm.forward(&fed)?)?;
        if let (Some(own), Some(input)) = (&self.per_layer_input, per_layer_input) {
            let gate = layers::gelu_tanh(&own.gate.forward(&hidden)?)?.multiply(input)?;
            hidden = hidden.add(own.norm.forward(&own.projection.forward(&gate)?)?)?;
        }
        Ok(hidden.multiply(&self.layer_scalar)?)
    }
}

impl Attention {
    fn load(config: &TextConfig, sizes: LayerSizes, module: &str, index: usize, loader: &mut Loader) -> Result<Self, WeightError> {
        let LayerSizes { full, head_dim, kv_heads, keys_are_values, .. } = sizes;
        let (hidden, heads, eps) = (config.hidden_size, config.num_attention_heads, config.rms_norm_eps);
        let (base, scaling) = config.rope(full);
        let rope = Rope::new(RopeOptions {
            head_dim,
            base,
            traditional: false,
            scaling,
            max_position_embeddings: Some(config.max_position_embeddings),
            factors: None,
        })
        .map_err(|reason| WeightError::Config(format!("layer {index}: {reason}")))?;
        let name = |name: &str| format!("{module}.{name}");
        let keys = match sizes.keys {
            KeysOf::Layer(owner) => {
                // Checkpoints have them, and nobody reads them.
                let unread = ["k_proj.", "v_proj.", "k_norm.", "v_norm."].map(&name);
                loader.ignore_where(|name| unread.iter().any(|unread| name.starts_with(unread)));
                Keys::Of(owner)
            }
            KeysOf::Own { kept } => {
                let outputs = kv_heads * head_dim;
                let window = (!full).then_some(config.sliding_window);
                Keys::Own {
                    k_proj: loader.linear(&name("k_proj"), hidden, outputs, false)?,
                    v_proj: if keys_are_values { None } else { Some(loader.linear(&name("v_proj"), hidden, outputs, false)?) },
                    k_norm: loader.rms_norm(&name("k_norm"), head_dim, eps)?,
                    layout: LayerLayout { kv_heads, head_dim, window },
                    kept,
                }
            }
        };
        Ok(Self {
            q_proj: loader.linear(&name("q_proj"), hidden, heads * head_dim, false)?,
            q_norm: loader.rms_norm(&name("q_norm"), head_dim, eps)?,
            keys,
            o_proj: loader.linear(&name("o_proj"), heads * head_dim, hidden, false)?,
            rope,
            heads,
            head_dim,
        })
    }

    /// (N, hidden) -> (N, hidden). Scores are not scaled: the norms of queries and keys have learned to.
    fn forward(&self, x: &Array, index: usize, step: &Step, cache: &mut Cache) -> Result<Array, EngineError> {
        const SCALE: f32 = 1.0;
        let split = |projected: &Array, heads: i32| layers::split_heads(projected, heads, self.head_dim);
        let queries = self.q_norm.forward(&split(&self.q_proj.forward(x)?, self.heads)?)?;
        let queries = self.rope.forward(&queries, step)?;
        let attended = match &self.keys {
            Keys::Of(owner) => cache.attend_kept(*owner, &queries, SCALE, step)?,
            Keys::Own { k_proj, v_proj, k_norm, layout, kept } => {
                let projected = split(&k_proj.forward(x)?, layout.kv_heads)?;
                let values = match v_proj {
                    Some(v_proj) => split(&v_proj.forward(x)?, layout.kv_heads)?,
                    None => projected.clone(),
                };
                let keys = self.rope.forward(&k_norm.forward(&projected)?, step)?;
                let values = fast::rms_norm(&values, None, k_norm.eps)?;
                if *kept {
                    cache.attend_and_keep(index, &queries, &keys, &values, SCALE, step)?
                } else {
                    cache.attend(index, &queries, &keys, &values, SCALE, step)?
                }
            }
        };
        self.o_proj.forward(&attended)
    }
}

impl Mixture {
    fn load(
        config: &TextConfig,
        sizes: MixtureSizes,
        module: &impl Fn(&str) -> String,
        loader: &mut Loader,
    ) -> Result<Self, WeightError> {
        let MixtureSizes { experts, taken, intermediate } = sizes;
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let scale = loader.tensor(&module("router.scale"), &[hidden])?;
        let root = Array::from_f32((f64::from(hidden)).powf(-0.5) as f32).as_dtype(scale.dtype())?;
        let weight = scale.multiply(root)?;
        loader.settle(&weight)?;
        let mut norm = |name: &str| loader.rms_norm(&module(name), hidden, eps);
        let post_mlp_norm = norm("post_feedforward_layernorm_1")?;
        let input_norm = norm("pre_feedforward_layernorm_2")?;
        let output_norm = norm("post_feedforward_layernorm_2")?;
        Ok(Self {
            router: loader.linear(&module("router.proj"), hidden, experts, false)?,
            router_norm: RmsNorm { weight, eps },
            per_expert_scale: loader.tensor(&module("router.per_expert_scale"), &[experts])?,
            taken,
            experts: load_experts(&module("experts"), hidden, experts, intermediate, loader)?,
            post_mlp_norm,
            input_norm,
            output_norm,
        })
    }

    /// `fed` is what the feed-forward half beside it gave, before its norm: (N, hidden) both -> (N, hidden)
    fn forward(&self, x: &Array, fed: &Array) -> Result<Array, EngineError> {
        let scores = self.router.forward(&self.router_norm.forward(x)?)?;
        let (tokens, experts) = (scores.dim(0), scores.dim(1));
        // (N, k)
        let chosen = ops::argpartition_axis(&scores, -self.taken, -1)?;
        let chosen = ffi::slice(&chosen, &[0, experts - self.taken], &[tokens, experts])?;
        let weights = ops::softmax_axis(scores.take_along_axis(&chosen, -1)?, -1, None)?;
        let weights = weights.multiply(self.per_expert_scale.take_axis(&chosen, 0)?)?;
        let outputs = self.experts.forward(&self.input_norm.forward(x)?, &chosen)?;
        let mixed = outputs.multiply(weights.reshape(&[tokens, self.taken, 1])?)?.sum_axes(&[-2], false)?;
        Ok(self.post_mlp_norm.forward(fed)?.add(self.output_norm.forward(&mixed)?)?)
    }
}

/// As Google has them, gates and their counterparts in one tensor, or as MLX has them.
fn load_experts(module: &str, hidden: i32, experts: i32, intermediate: i32, loader: &mut Loader) -> Result<Experts, WeightError> {
    let activation = Activation::GeluTanh;
    let both = format!("{module}.gate_up_proj");
    if !loader.has(&both) {
        let name = |name: &str| format!("{module}.switch_glu.{name}");
        return Ok(Experts {
            gate_proj: loader.experts(&name("gate_proj"), experts, hidden, intermediate)?,
            up_proj: loader.experts(&name("up_proj"), experts, hidden, intermediate)?,
            down_proj: loader.experts(&name("down_proj"), experts, intermediate, hidden)?,
            activation,
        });
    }
    let both = loader.tensor(&both, &[experts, 2 * intermediate, hidden])?;
    let half = |first: i32| -> Result<ExpertLinear, WeightError> {
        let half = ffi::slice(&both, &[0, first, 0], &[experts, first + intermediate, hidden]);
        let half = half.map_err(|error| WeightError::Mlx(error.to_string()))?.contiguous()?;
        loader.settle(&half)?;
        Ok(ExpertLinear::Dense(half))
    };
    Ok(Experts {
        gate_proj: half(0)?,
        up_proj: half(intermediate)?,
        down_proj: ExpertLinear::Dense(loader.tensor(&format!("{module}.down_proj"), &[experts, hidden, intermediate])?),
        activation,
    })
}
