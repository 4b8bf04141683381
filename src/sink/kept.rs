//! Types of the manifest's columns that are kept in the results.
//!
//! A kept column has the narrowest type that holds every value seen so far: it starts without one and widens. A type is never
//! guessed from names or from a first few rows alone, and a value that does not fit widens the column instead of being lost.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, BooleanBuilder, Float64Builder, Int64Builder, StringBuilder, new_null_array},
    compute::cast,
    datatypes::{DataType, Float64Type, Int64Type},
    error::ArrowError,
};
use serde_json::Value;

/// Integers up to here are the same in 64-bit floats.
const FLOAT_INTEGER_MAX: u64 = 1 << 53;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeptType {
    /// Only missing values so far; stored as text.
    Unknown,
    Bool,
    /// Within ±2^53: it can still become a float.
    Integer,
    LargeInteger,
    Float,
    /// Strings as they are, any other value as JSON.
    Text,
}

impl KeptType {
    pub const ALL: [KeptType; 6] =
        [KeptType::Unknown, KeptType::Bool, KeptType::Integer, KeptType::LargeInteger, KeptType::Float, KeptType::Text];

    pub fn of(value: &Value) -> Self {
        match value {
            Value::Null => KeptType::Unknown,
            Value::Bool(_) => KeptType::Bool,
            Value::Number(number) => match number.as_i64() {
                Some(integer) if integer.unsigned_abs() <= FLOAT_INTEGER_MAX => KeptType::Integer,
                Some(_) => KeptType::LargeInteger,
                None if number.is_u64() => KeptType::Text,
                None => KeptType::Float,
            },
            Value::String(_) | Value::Array(_) | Value::Object(_) => KeptType::Text,
        }
    }

    /// The narrowest type that holds the values of both.
    pub fn join(self, other: Self) -> Self {
        use KeptType::*;
        match (self, other) {
            (a, b) if a == b => a,
            (Unknown, known) | (known, Unknown) => known,
            (Integer, LargeInteger) | (LargeInteger, Integer) => LargeInteger,
            (Integer, Float) | (Float, Integer) => Float,
            _ => Text,
        }
    }

    pub fn data_type(self) -> DataType {
        match self {
            KeptType::Bool => DataType::Boolean,
            KeptType::Integer | KeptType::LargeInteger => DataType::Int64,
            KeptType::Float => DataType::Float64,
            KeptType::Unknown | KeptType::Text => DataType::Utf8,
        }
    }

    /// As a part's metadata has it.
    pub fn name(self) -> &'static str {
        match self {
            KeptType::Unknown => "unknown",
            KeptType::Bool => "bool",
            KeptType::Integer => "integer",
            KeptType::LargeInteger => "large_integer",
            KeptType::Float => "float",
            KeptType::Text => "text",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// An array of a narrower kept type as one of a wider.
pub(super) fn widen(array: &ArrayRef, to: &DataType) -> Result<ArrayRef, ArrowError> {
    match array.data_type() == to {
        true => Ok(array.clone()),
        false if array.null_count() == array.len() => Ok(new_null_array(to, array.len())),
        false => cast(array, to),
    }
}

/// The values of one kept column in the part in hand.
#[derive(Debug)]
pub(super) struct KeptColumn {
    kind: KeptType,
    values: Values,
}

#[derive(Debug)]
enum Values {
    Missing(usize),
    Bool(BooleanBuilder),
    Integer(Int64Builder),
    Float(Float64Builder),
    Text(StringBuilder),
}

impl KeptColumn {
    pub fn new() -> Self {
        KeptColumn { kind: KeptType::Unknown, values: Values::Missing(0) }
    }

    pub fn kind(&self) -> KeptType {
        self.kind
    }

    /// Adds a value, and returns the bytes it takes.
    pub fn push(&mut self, value: Option<&Value>) -> Result<usize, ArrowError> {
        let value = value.unwrap_or(&Value::Null);
        let kind = self.kind.join(KeptType::of(value));
        if kind != self.kind {
            self.become_kind(kind)?;
        }
        match &mut self.values {
            Values::Missing(count) => *count += 1,
            Values::Bool(values) => values.append_option(value.as_bool()),
            Values::Integer(values) => values.append_option(value.as_i64()),
            Values::Float(values) => values.append_option(value.as_f64()),
            Values::Text(values) => match value {
                Value::Null => values.append_null(),
                Value::String(text) => {
                    values.append_value(text);
                    return Ok(text.len());
                }
                other => {
                    let text = other.to_string();
                    values.append_value(&text);
                    return Ok(text.len());
                }
            },
        }
        Ok(8)
    }

    fn become_kind(&mut self, kind: KeptType) -> Result<(), ArrowError> {
        if matches!(self.values, Values::Missing(_)) || self.kind.data_type() != kind.data_type() {
            let so_far = widen(&self.take(), &kind.data_type())?;
            self.values = match kind {
                KeptType::Unknown => Values::Missing(so_far.len()),
                KeptType::Bool => {
                    let mut values = BooleanBuilder::new();
                    values.append_array(so_far.as_boolean());
                    Values::Bool(values)
                }
                KeptType::Integer | KeptType::LargeInteger => {
                    let mut values = Int64Builder::new();
                    values.append_array(so_far.as_primitive::<Int64Type>());
                    Values::Integer(values)
                }
                KeptType::Float => {
                    let mut values = Float64Builder::new();
                    values.append_array(so_far.as_primitive::<Float64Type>());
                    Values::Float(values)
                }
                KeptType::Text => {
                    let mut values = StringBuilder::new();
                    values.append_array(so_far.as_string::<i32>())?;
                    Values::Text(values)
                }
            };
        }
        self.kind = kind;
        Ok(())
    }

    /// The values so far; the column keeps its kind and is empty.
    pub fn take(&mut self) -> ArrayRef {
        match &mut self.values {
            Values::Missing(count) => new_null_array(&DataType::Utf8, std::mem::take(count)),
            Values::Bool(values) => Arc::new(values.finish()),
            Values::Integer(values) => Arc::new(values.finish()),
            Values::Float(values) => Arc::new(values.finish()),
            Values::Text(values) => Arc::new(values.finish()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::util::display::array_value_to_string;
    use serde_json::json;

    fn check(values: Value, kind: KeptType, expected: &str) {
        let mut column = KeptColumn::new();
        for value in values.as_array().unwrap() {
            column.push(Some(value)).unwrap();
        }
        assert_eq!(column.kind(), kind, "{values}");
        let array = column.take();
        assert_eq!(array.data_type(), &kind.data_type());
        let texts: Vec<_> = (0..array.len())
            .map(|at| if array.is_null(at) { "-".into() } else { array_value_to_string(&array, at).unwrap() })
            .collect();
        assert_eq!(texts.join(" | "), expected, "{values}");
    }

    #[test]
    fn a_column_has_the_narrowest_type_that_holds_all_its_values() {
        check(json!([null, null]), KeptType::Unknown, "- | -");
        check(json!([null, true, null, false]), KeptType::Bool, "- | true | - | false");
        check(json!([1, null, -2]), KeptType::Integer, "1 | - | -2");
        check(json!([1, 9_007_199_254_740_993_i64]), KeptType::LargeInteger, "1 | 9007199254740993");
        check(json!([1, null, 2.5]), KeptType::Float, "1.0 | - | 2.5");
        check(json!(["a", null, "5"]), KeptType::Text, "a | - | 5");
    }

    #[test]
    fn a_value_that_does_not_fit_becomes_text_and_none_is_lost() {
        check(json!([true, 1, null, "x"]), KeptType::Text, "true | 1 | - | x");
        check(json!([9_007_199_254_740_993_i64, 2.5]), KeptType::Text, "9007199254740993 | 2.5");
        check(json!([1, u64::MAX]), KeptType::Text, "1 | 18446744073709551615");
        check(json!([{"b": 1, "a": [2]}, "x"]), KeptType::Text, r#"{"b":1,"a":[2]} | x"#);
        check(json!([1e300, "x"]), KeptType::Text, "1e300 | x");
    }

    #[test]
    fn joining_types_depends_on_no_order() {
        for a in KeptType::ALL {
            for b in KeptType::ALL {
                assert_eq!(a.join(b), b.join(a));
                for c in KeptType::ALL {
                    assert_eq!(a.join(b).join(c), a.join(b.join(c)), "{a:?} {b:?} {c:?}");
                }
            }
        }
    }
}
