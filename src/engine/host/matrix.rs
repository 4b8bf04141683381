//! Weights in panels, packed as they are stored, and products with them.

use std::cell::RefCell;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::{
    pack::Packed,
    panel::{self, Bfloat16, Bits, Code, Float16, Float32, Panel, Scale, Scratch},
    simd::{Line, PANEL, set_pair},
};

/// A weight (outputs, inputs) as its file has it. Numbers of a word stand in it from its lowest bits on.
#[derive(Debug, Clone, Copy)]
pub enum Stored<'a> {
    /// (outputs, inputs)
    Float32(&'a [f32]),
    /// (outputs, inputs / 2) words of two numbers.
    Bfloat16(&'a [u32]),
    Float16(&'a [u32]),
    /// MLX's affine quantization: (outputs, inputs × bits / 32) words, and scales and biases (outputs, inputs / group_size).
    Affine {
        words: &'a [u32],
        scales: &'a [f32],
        biases: &'a [f32],
        group_size: usize,
        bits: u32,
    },
}

/// A weight, or several over the same inputs whose outputs follow each other.
#[derive(Debug)]
pub struct HostMatrix {
    inputs: usize,
    outputs: usize,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    first_output: usize,
    outputs: usize,
    kind: Kind,
    /// (panels, inputs / numbers of a word)
    words: Vec<Line<u32>>,
    /// (panels, groups)
    scales: Vec<Scale>,
    group_words: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Bits2,
    Bits4,
    Bits8,
    Bfloat16,
    Float16,
    Float32,
}

/// What a product does with what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    Set,
    Add,
}

/// Multiplications that are worth a task of their own.
const TASK_PRODUCTS_MIN: usize = 1 << 17;
/// Tasks a thread, so that one that is held up does not hold up the others.
const TASKS_PER_THREAD: usize = 4;

/// Numbers of rows that are multiplied by one panel after the other: 512 KiB, which the second-level cache keeps.
const ROWS_NUMBERS_MAX: usize = 1 << 17;

impl HostMatrix {
    /// Packs a weight. Its numbers must be as many as the shape says, and its groups whole.
    pub fn new(stored: Stored<'_>, outputs: usize, inputs: usize) -> Self {
        Self { inputs, outputs, parts: vec![Part::new(stored, outputs, inputs)] }
    }

    /// One product instead of several over the same inputs.
    pub fn stacked(matrices: Vec<Self>) -> Self {
        let (mut parts, mut outputs) = (Vec::new(), 0);
        let inputs = matrices.first().map_or(0, |matrix| matrix.inputs);
        for matrix in matrices {
            debug_assert_eq!(matrix.inputs, inputs, "the same inputs");
            parts.extend(matrix.parts.into_iter().map(|part| Part { first_output: outputs + part.first_output, ..part }));
            outputs += matrix.outputs;
        }
        Self { inputs, outputs, parts }
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Output `index`'s own weights, (inputs): a token's row of an embedding.
    pub fn row(&self, index: usize, weights: &mut [f32]) {
        let part = self.parts.iter().rfind(|part| part.first_output <= index);
        if let Some(part) = part {
            part.row(index - part.first_output, weights);
        }
    }

    /// `y = x @ weightᵀ + bias` or `y += …`: (rows, inputs) -> (rows, outputs).
    pub fn product(&self, x: &Packed, bias: Option<&[f32]>, write: Write, y: &mut [f32]) {
        debug_assert_eq!((x.inputs(), x.rows() * self.outputs), (self.inputs, y.len()));
        if x.rows() == 0 || self.outputs == 0 {
            return;
        }
        let arch = Arch::new();
        let panels: Vec<(&Part, usize)> =
            self.parts.iter().flat_map(|part| (0..part.outputs.div_ceil(PANEL)).map(move |panel| (part, panel))).collect();
        let products = panels.len() * PANEL * self.inputs * x.rows();
        let tasks = (products / TASK_PRODUCTS_MIN).clamp(1, TASKS_PER_THREAD * rayon::current_num_threads());
        let mut tasks: Vec<Task<'_>> = panels.chunks(panels.len().div_ceil(tasks)).map(Task::new).collect();
        for row in y.chunks_exact_mut(self.outputs) {
            let mut left = row;
            for task in &mut tasks {
                let (own, rest) = left.split_at_mut(task.width);
                task.rows.push(own);
                left = rest;
            }
        }
        let compute = |task: Task<'_>| task.compute(arch, x, bias, write);
        if tasks.len() == 1 {
            tasks.into_iter().for_each(compute);
        } else {
            tasks.into_par_iter().with_max_len(1).for_each(compute);
        }
    }
}

/// Some panels of a product, and the columns of its result that they give.
struct Task<'a> {
    panels: &'a [(&'a Part, usize)],
    width: usize,
    rows: Vec<&'a mut [f32]>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

impl<'a> Task<'a> {
    fn new(panels: &'a [(&'a Part, usize)]) -> Self {
        Self { panels, width: panels.iter().map(|(part, panel)| part.width(*panel)).sum(), rows: Vec::new() }
    }

    fn compute(mut self, arch: Arch, x: &Packed, bias: Option<&[f32]>, write: Write) {
        let blocks: Vec<(usize, &[f32])> = x.blocks().collect();
        let rows_max = blocks.first().map_or(1, |(rows, _)| *rows).max(1);
        let group = (ROWS_NUMBERS_MAX / (rows_max * x.inputs().max(1))).max(1);
        SCRATCH.with_borrow_mut(|scratch| {
            let mut first_row = 0;
            for blocks in blocks.chunks(group) {
                let rows = blocks.iter().map(|(rows, _)| rows).sum();
                scratch.reserve(rows);
                let mut at = 0;
                for &(part, panel) in self.panels {
                    part.multiply(arch, panel, blocks, scratch);
                    let width = part.width(panel);
                    let first = part.first_output + panel * PANEL;
                    let bias = bias.map(|bias| &bias[first..first + width]);
                    for (row, sums) in self.rows[first_row..].iter_mut().zip(&scratch.sums) {
                        write_sums(&mut row[at..at + width], &sums.0, bias, write);
                    }
                    at += width;
                }
                first_row += rows;
            }
        });
    }
}

/// `y = sums + bias` or `y += sums + bias`.
fn write_sums(y: &mut [f32], sums: &[f32; PANEL], bias: Option<&[f32]>, write: Write) {
    if let (Ok(y), None) = (<&mut [f32; PANEL]>::try_from(&mut *y), bias) {
        match write {
            Write::Set => *y = *sums,
            Write::Add => y.iter_mut().zip(sums).for_each(|(y, sum)| *y += sum),
        }
        return;
    }
    for (column, (y, sum)) in y.iter_mut().zip(sums).enumerate() {
        let sum = bias.map_or(*sum, |bias| sum + bias[column]);
        match write {
            Write::Set => *y = sum,
            Write::Add => *y += sum,
        }
    }
}

impl Part {
    fn new(stored: Stored<'_>, outputs: usize, inputs: usize) -> Self {
        // An odd row of half-precision numbers does not divide into words.
        match stored {
            Stored::Float32(numbers) => {
                Self::of_words(Kind::Float32, outputs, inputs, |row| numbers[row * inputs..][..inputs].iter().map(|x| x.to_bits()))
            }
            Stored::Bfloat16(words) => Self::of_words(Kind::Bfloat16, outputs, inputs, |row| row_of(words, row, inputs / 2)),
            Stored::Float16(words) => Self::of_words(Kind::Float16, outputs, inputs, |row| row_of(words, row, inputs / 2)),
            Stored::Affine { words, scales, biases, group_size, bits } => {
                let row_words = inputs * bits as usize / 32;
                let (kind, kept) = match bits {
                    2 => (Kind::Bits2, 2),
                    3 | 4 => (Kind::Bits4, 4),
                    _ => (Kind::Bits8, 8),
                };
                let mut part = if kept == bits {
                    Self::of_words(kind, outputs, inputs, |row| row_of(words, row, row_words))
                } else {
                    let wider = |row: usize| widened(&words[row * row_words..][..row_words], bits, kept);
                    Self::of_words(kind, outputs, inputs, wider)
                };
                part.group_words = group_size * kept as usize / 32;
                let groups = inputs / group_size;
                part.scales = vec![[Line::ZERO; 2]; outputs.div_ceil(PANEL) * groups];
                for row in 0..outputs {
                    for group in 0..groups {
                        let [scale, bias] = &mut part.scales[row / PANEL * groups + group];
                        scale.0[row % PANEL] = scales[row * groups + group];
                        bias.0[row % PANEL] = biases[row * groups + group];
                    }
                }
                part
            }
        }
    }

    /// Words of each row into panels.
    fn of_words<I: Iterator<Item = u32>>(kind: Kind, outputs: usize, inputs: usize, row: impl Fn(usize) -> I) -> Self {
        let panel_words = inputs / kind.per_word();
        let mut words = vec![Line([0; PANEL]); outputs.div_ceil(PANEL) * panel_words];
        for output in 0..outputs {
            let panel = &mut words[output / PANEL * panel_words..][..panel_words];
            for (line, word) in panel.iter_mut().zip(row(output)) {
                line.0[output % PANEL] = word;
            }
        }
        Self { first_output: 0, outputs, kind, words, scales: Vec::new(), group_words: panel_words }
    }

    fn panel(&self, panel: usize) -> Panel<'_> {
        let panels = self.outputs.div_ceil(PANEL);
        let (words, groups) = (self.words.len() / panels, self.scales.len() / panels);
        Panel {
            words: &self.words[panel * words..][..words],
            scales: &self.scales[panel * groups..][..groups],
            group_words: self.group_words,
        }
    }

    /// Columns of a panel that are outputs.
    fn width(&self, panel: usize) -> usize {
        (self.outputs - panel * PANEL).min(PANEL)
    }

    fn multiply(&self, arch: Arch, panel: usize, x: &[(usize, &[f32])], scratch: &mut Scratch) {
        let panel = self.panel(panel);
        match self.kind {
            Kind::Bits2 => panel::multiply::<Bits<2>>(arch, panel, x, scratch),
            Kind::Bits4 => panel::multiply::<Bits<4>>(arch, panel, x, scratch),
            Kind::Bits8 => panel::multiply::<Bits<8>>(arch, panel, x, scratch),
            Kind::Bfloat16 => panel::multiply::<Bfloat16>(arch, panel, x, scratch),
            Kind::Float16 => panel::multiply::<Float16>(arch, panel, x, scratch),
            Kind::Float32 => panel::multiply::<Float32>(arch, panel, x, scratch),
        }
    }

    fn row(&self, row: usize, weights: &mut [f32]) {
        let (panel, column) = (self.panel(row / PANEL), row % PANEL);
        let arch = Arch::new();
        match self.kind {
            Kind::Bits2 => arch.dispatch(Row::<Bits<2>>::new(panel, column, weights)),
            Kind::Bits4 => arch.dispatch(Row::<Bits<4>>::new(panel, column, weights)),
            Kind::Bits8 => arch.dispatch(Row::<Bits<8>>::new(panel, column, weights)),
            Kind::Bfloat16 => arch.dispatch(Row::<Bfloat16>::new(panel, column, weights)),
            Kind::Float16 => arch.dispatch(Row::<Float16>::new(panel, column, weights)),
            Kind::Float32 => arch.dispatch(Row::<Float32>::new(panel, column, weights)),
        }
    }
}

impl Kind {
    fn per_word(self) -> usize {
        match self {
            Self::Bits2 => Bits::<2>::PER_WORD,
            Self::Bits4 => Bits::<4>::PER_WORD,
            Self::Bits8 => Bits::<8>::PER_WORD,
            Self::Bfloat16 | Self::Float16 => Bfloat16::PER_WORD,
            Self::Float32 => Float32::PER_WORD,
        }
    }
}

fn row_of(words: &[u32], row: usize, row_words: usize) -> impl Iterator<Item = u32> {
    words[row * row_words..][..row_words].iter().copied()
}

/// Codes of `bits` bits, which stand one after the other whatever words they cross, as codes of `kept` bits.
fn widened(words: &[u32], bits: u32, kept: u32) -> impl Iterator<Item = u32> {
    let per_word = (32 / kept) as usize;
    let codes = words.len() * 32 / bits as usize;
    let code = move |index: usize| {
        let at = index * bits as usize;
        let low = u64::from(words[at / 32]);
        let high = u64::from(words.get(at / 32 + 1).copied().unwrap_or(0));
        ((low | high << 32) >> (at % 32)) as u32 & ((1 << bits) - 1)
    };
    (0..codes / per_word).map(move |word| (0..per_word).fold(0, |sum, i| sum | code(word * per_word + i) << (i as u32 * kept)))
}

/// One column of a panel, unpacked as products unpack it.
struct Row<'a, C> {
    panel: Panel<'a>,
    column: usize,
    weights: &'a mut [f32],
    code: std::marker::PhantomData<C>,
}

impl<'a, C> Row<'a, C> {
    fn new(panel: Panel<'a>, column: usize, weights: &'a mut [f32]) -> Self {
        Self { panel, column, weights, code: std::marker::PhantomData }
    }
}

impl<C: Code> WithSimd for Row<'_, C> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let group = self.panel.group_words;
        for (at, (line, weights)) in self.panel.words.iter().zip(self.weights.chunks_mut(C::PER_WORD)).enumerate() {
            let word = simd.splat_u32s(line.0[self.column]);
            for (index, weight) in weights.iter_mut().enumerate() {
                let mut number = C::number(simd, word, index);
                if C::SCALED {
                    let [scale, bias] = &self.panel.scales[at / group];
                    let (scale, bias) = (simd.splat_f32s(scale.0[self.column]), simd.splat_f32s(bias.0[self.column]));
                    number = simd.mul_add_f32s(number, scale, bias);
                }
                let mut lanes = Line::ZERO;
                set_pair::<S>(&mut lanes, 0, [number; 2]);
                *weight = lanes.0[0];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|index| ((index * 7919 + seed * 104_729) % 2003) as f32 * 1e-3 - 1.0).collect()
    }

    fn product(matrix: &HostMatrix, x: &[f32], bias: Option<&[f32]>, write: Write, y: &mut [f32]) {
        let mut packed = Packed::default();
        packed.pack(x, matrix.inputs(), matrix.inputs());
        matrix.product(&packed, bias, write, y);
    }

    /// A weight in `bits` bits, and what it stands for.
    fn affine(outputs: usize, inputs: usize, group_size: usize, bits: u32) -> (HostMatrix, Vec<f32>) {
        let codes: Vec<u32> = (0..outputs * inputs).map(|index| (index as u32).wrapping_mul(0x9e37_79b9) >> (32 - bits)).collect();
        let mut words = Vec::new();
        for row in codes.chunks(inputs) {
            let mut of_row = vec![0u32; inputs * bits as usize / 32 + 1];
            for (index, &code) in row.iter().enumerate() {
                let at = index * bits as usize;
                of_row[at / 32] |= code << (at % 32);
                if at % 32 + bits as usize > 32 {
                    of_row[at / 32 + 1] |= code >> (32 - at % 32);
                }
            }
            words.extend_from_slice(&of_row[..inputs * bits as usize / 32]);
        }
        let (scales, biases) = (numbers(outputs * inputs / group_size, 3), numbers(outputs * inputs / group_size, 4));
        let dense = codes.iter().enumerate().map(|(index, &code)| {
            let group = index / group_size;
            (code as f32).mul_add(scales[group], biases[group])
        });
        let stored = Stored::Affine { words: &words, scales: &scales, biases: &biases, group_size, bits };
        (HostMatrix::new(stored, outputs, inputs), dense.collect())
    }

    /// Products of each row count against sums in double precision, and a row's own against those of the row alone, bit for bit.
    fn check(matrix: &HostMatrix, weights: &[f32], what: &str) {
        let (outputs, inputs) = (matrix.outputs(), matrix.inputs());
        let mut row = vec![0.0; inputs];
        for output in 0..outputs {
            matrix.row(output, &mut row);
            assert_eq!(row, weights[output * inputs..][..inputs], "{what}: row {output}");
        }
        let x = numbers(40 * inputs, 5);
        let mut alone = vec![0.0; 40 * outputs];
        for (x, y) in x.chunks(inputs).zip(alone.chunks_mut(outputs)) {
            product(matrix, x, None, Write::Set, y);
            for (output, (y, weights)) in y.iter().zip(weights.chunks(inputs)).enumerate() {
                let terms = || x.iter().zip(weights).map(|(&x, &weight)| f64::from(x) * f64::from(weight));
                let (exact, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                assert!((f64::from(*y) - exact).abs() <= 1e-5 * size, "{what}: output {output} is {y}, not {exact}");
            }
        }
        for rows in [2, 3, 4, 5, 7, 12, 13, 32, 40] {
            let mut y = vec![f32::NAN; rows * outputs];
            product(matrix, &x[..rows * inputs], None, Write::Set, &mut y);
            assert!(y == alone[..rows * outputs], "{what}: {rows} rows differ from each alone");
        }
        let bias = numbers(outputs, 6);
        let mut y = vec![1.0; outputs];
        product(matrix, &x[..inputs], Some(&bias), Write::Add, &mut y);
        let expected: Vec<f32> = alone.iter().zip(&bias).map(|(y, bias)| 1.0 + (y + bias)).collect();
        assert_eq!(y, expected, "{what}: added with a bias");
    }

    #[test]
    fn rows_are_the_same_in_any_company() {
        for bits in [2, 3, 4, 5, 6, 8] {
            for group_size in [32, 64, 128] {
                let (matrix, weights) = affine(70, 384, group_size, bits);
                check(&matrix, &weights, &format!("{bits} bits in groups of {group_size}"));
            }
        }
        let weights = numbers(33 * 201, 1);
        check(&HostMatrix::new(Stored::Float32(&weights), 33, 201), &weights, "float32");
        let halves = |weights: &[f32]| -> Vec<u32> {
            weights.as_chunks::<2>().0.iter().map(|pair| pair[0].to_bits() >> 16 | pair[1].to_bits() & 0xffff_0000).collect()
        };
        let words = halves(&numbers(40 * 500, 2));
        let weights: Vec<f32> =
            words.iter().flat_map(|word| [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]).collect();
        check(&HostMatrix::new(Stored::Bfloat16(&words), 40, 500), &weights, "bfloat16");
    }

    /// All finite halves, subnormal ones included.
    #[test]
    fn halves_are_unpacked_exactly() {
        let halves: Vec<u32> = (0..0x10000).filter(|half| half & 0x7c00 != 0x7c00).collect();
        let exact = |half: u32| {
            let (exponent, fraction) = ((half >> 10 & 31) as i32, f64::from(half & 1023));
            let size = if exponent == 0 { fraction * 2f64.powi(-24) } else { (1024.0 + fraction) * 2f64.powi(exponent - 25) };
            (if half & 0x8000 == 0 { size } else { -size }) as f32
        };
        let words: Vec<u32> = halves.as_chunks::<2>().0.iter().map(|pair| pair[0] | pair[1] << 16).collect();
        let matrix = HostMatrix::new(Stored::Float16(&words), 1, halves.len());
        let mut weights = vec![0.0; halves.len()];
        matrix.row(0, &mut weights);
        assert!(halves.iter().zip(&weights).all(|(&half, weight)| exact(half).to_bits() == weight.to_bits()));
    }

    #[test]
    fn stacked_products_are_those_of_the_parts() {
        let ((first, _), (second, _)) = (affine(70, 64, 32, 4), affine(33, 64, 64, 8));
        let ((a, mut weights), (b, rest)) = (affine(70, 64, 32, 4), affine(33, 64, 64, 8));
        let x = numbers(6 * 64, 1);
        let (mut y_first, mut y_second, mut y) = (vec![0.0; 6 * 70], vec![0.0; 6 * 33], vec![0.0; 6 * 103]);
        product(&first, &x, None, Write::Set, &mut y_first);
        product(&second, &x, None, Write::Set, &mut y_second);
        let stacked = HostMatrix::stacked(vec![a, b]);
        product(&stacked, &x, None, Write::Set, &mut y);
        for row in 0..6 {
            assert_eq!(y[row * 103..][..70], y_first[row * 70..][..70]);
            assert_eq!(y[row * 103 + 70..][..33], y_second[row * 33..][..33]);
        }
        weights.extend(rest);
        check(&stacked, &weights, "stacked");
    }
}
