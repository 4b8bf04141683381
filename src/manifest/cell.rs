//! Values of Arrow arrays as JSON.

use arrow::array::{Array, AsArray, PrimitiveArray};
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, TimeUnit,
    TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType, TimestampSecondType, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use serde_json::{Map, Number, Value};

/// How deep lists and structs may lie in each other, as in JSON.
const DEPTH_MAX: usize = 127;

/// The part of a type that [`value`] cannot read, if there is one.
pub(super) fn unreadable(data_type: &DataType) -> Option<&DataType> {
    unreadable_at(data_type, 0)
}

fn unreadable_at(data_type: &DataType, depth: usize) -> Option<&DataType> {
    use DataType::*;
    if depth > DEPTH_MAX {
        return Some(data_type);
    }
    match data_type {
        Null | Boolean | Utf8 | Float16 | Float32 | Float64 | Timestamp(..) | Date32 | Date64 | Time32(_) | Time64(_) => None,
        Int8 | Int16 | Int32 | Int64 | UInt8 | UInt16 | UInt32 | UInt64 => None,
        Decimal32(..) | Decimal64(..) | Decimal128(..) | Decimal256(..) => None,
        List(field) => unreadable_at(field.data_type(), depth + 1),
        Struct(fields) => fields.iter().find_map(|field| unreadable_at(field.data_type(), depth + 1)),
        Map(entries, _) => match entries.data_type() {
            Struct(fields) if fields.len() == 2 && *fields[0].data_type() == Utf8 => {
                unreadable_at(fields[1].data_type(), depth + 1)
            }
            _ => Some(data_type),
        },
        _ => Some(data_type),
    }
}

/// The value at `index`: numbers as they are (not-a-number is missing, infinities are text), times in ISO 8601, decimals as text.
///
/// # Errors
/// A sentence on a value that its own type does not allow.
pub(super) fn value(array: &dyn Array, index: usize) -> Result<Value, String> {
    if array.is_null(index) {
        return Ok(Value::Null);
    }
    Ok(match array.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => Value::Bool(array.as_boolean().value(index)),
        DataType::Utf8 => Value::String(array.as_string::<i32>().value(index).to_owned()),
        DataType::Int8 => integer::<Int8Type>(array, index),
        DataType::Int16 => integer::<Int16Type>(array, index),
        DataType::Int32 => integer::<Int32Type>(array, index),
        DataType::Int64 => integer::<Int64Type>(array, index),
        DataType::UInt8 => integer::<UInt8Type>(array, index),
        DataType::UInt16 => integer::<UInt16Type>(array, index),
        DataType::UInt32 => integer::<UInt32Type>(array, index),
        DataType::UInt64 => integer::<UInt64Type>(array, index),
        DataType::Float16 => float(f64::from(array.as_primitive::<Float16Type>().value(index))),
        DataType::Float32 => {
            // 0.1 and not 0.10000000149011612.
            let number = array.as_primitive::<Float32Type>().value(index);
            float(number.to_string().parse().unwrap_or(f64::from(number)))
        }
        DataType::Float64 => float(array.as_primitive::<Float64Type>().value(index)),
        DataType::Timestamp(unit, zone) => {
            // Parquet has two kinds: instants, which are in UTC, and local times without a zone.
            let local: Box<dyn Array> = match unit {
                TimeUnit::Second => Box::new(without_zone::<TimestampSecondType>(array)),
                TimeUnit::Millisecond => Box::new(without_zone::<TimestampMillisecondType>(array)),
                TimeUnit::Microsecond => Box::new(without_zone::<TimestampMicrosecondType>(array)),
                TimeUnit::Nanosecond => Box::new(without_zone::<TimestampNanosecondType>(array)),
            };
            Value::String(displayed(&*local, index)? + if zone.is_some() { "Z" } else { "" })
        }
        DataType::List(_) => {
            let list = array.as_list::<i32>().value(index);
            (0..list.len()).map(|index| value(&list, index)).collect::<Result<_, _>>().map(Value::Array)?
        }
        DataType::Struct(fields) => {
            let columns = array.as_struct().columns();
            let fields = fields.iter().zip(columns).map(|(field, column)| Ok((field.name().clone(), value(column, index)?)));
            Value::Object(fields.collect::<Result<Map<_, _>, String>>()?)
        }
        DataType::Map(..) => {
            let entries = array.as_map().value(index);
            let (keys, values) = (entries.column(0).as_string::<i32>(), entries.column(1));
            let entries = (0..entries.len()).map(|index| Ok((keys.value(index).to_owned(), value(values, index)?)));
            Value::Object(entries.collect::<Result<Map<_, _>, String>>()?)
        }
        _ => Value::String(displayed(array, index)?),
    })
}

fn integer<T: ArrowPrimitiveType>(array: &dyn Array, index: usize) -> Value
where
    T::Native: Into<Number>,
{
    Value::Number(array.as_primitive::<T>().value(index).into())
}

fn float(number: f64) -> Value {
    match Number::from_f64(number) {
        Some(number) => Value::Number(number),
        None if number.is_nan() => Value::Null,
        None => Value::String(number.to_string()),
    }
}

fn without_zone<T: arrow::datatypes::ArrowTimestampType>(array: &dyn Array) -> PrimitiveArray<T> {
    array.as_primitive::<T>().clone().with_timezone_opt(None::<std::sync::Arc<str>>)
}

fn displayed(array: &dyn Array, index: usize) -> Result<String, String> {
    let options = FormatOptions::new().with_display_error(false);
    let shown = ArrayFormatter::try_new(array, &options).and_then(|shown| shown.value(index).try_to_string());
    shown.map_err(|error| format!("a value of type {} has no meaning ({error}); correct it", array.data_type()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{
        ArrayRef, BooleanArray, Date32Array, Decimal128Array, Float32Array, Float64Array, Int64Array, ListArray, MapBuilder,
        NullArray, StringArray, StringBuilder, StructArray, Time32SecondArray, TimestampMicrosecondArray, TimestampSecondArray,
        UInt64Array,
    };
    use arrow::datatypes::Field;
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(array: impl Array + 'static, expected: Value) {
        assert_eq!(unreadable(array.data_type()), None);
        let values: Vec<Value> = (0..array.len()).map(|index| value(&array, index).unwrap()).collect();
        assert_eq!(Value::Array(values), expected);
    }

    #[test]
    fn scalars() {
        check(BooleanArray::from(vec![Some(true), None]), json!([true, null]));
        check(StringArray::from(vec![Some("é\0"), None, Some("")]), json!(["é\0", null, ""]));
        check(Int64Array::from(vec![i64::MIN, 0]), json!([i64::MIN, 0]));
        check(UInt64Array::from(vec![u64::MAX]), json!([u64::MAX]));
        check(Float32Array::from(vec![0.1, 1e-3, -2.0]), json!([0.1, 0.001, -2.0]));
        check(Float64Array::from(vec![0.1, f64::NAN, f64::INFINITY, f64::NEG_INFINITY]), json!([0.1, null, "inf", "-inf"]));
        check(NullArray::new(2), json!([null, null]));
    }

    #[test]
    fn times_and_decimals_are_text() {
        check(Date32Array::from(vec![Some(0), None, Some(20_000)]), json!(["1970-01-01", null, "2024-10-04"]));
        check(Time32SecondArray::from(vec![61]), json!(["00:01:01"]));
        check(TimestampSecondArray::from(vec![Some(1_700_000_000), None]), json!(["2023-11-14T22:13:20", null]));
        let zoned = TimestampMicrosecondArray::from(vec![1_700_000_000_500_000]).with_timezone("UTC");
        check(zoned, json!(["2023-11-14T22:13:20.500Z"]));
        let decimal = Decimal128Array::from(vec![12_345, -5]).with_precision_and_scale(10, 2).unwrap();
        check(decimal, json!(["123.45", "-0.05"]));
        let beyond = TimestampSecondArray::from(vec![i64::MAX]);
        assert!(value(&beyond, 0).unwrap_err().contains("has no meaning"));
    }

    #[test]
    fn lists_structs_and_maps() {
        let list = ListArray::from_iter_primitive::<Int32Type, _, _>(vec![Some(vec![Some(1), None]), None]);
        check(list, json!([[1, null], null]));
        let field = |name: &str, data_type| Arc::new(Field::new(name, data_type, true));
        let text: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
        let number: ArrayRef = Arc::new(Int64Array::from(vec![7]));
        let inner = StructArray::from(vec![(field("z", DataType::Utf8), text), (field("a", DataType::Int64), number)]);
        let outer = StructArray::from(vec![(field("inner", inner.data_type().clone()), Arc::new(inner) as ArrayRef)]);
        check(outer, json!([{"inner": {"z": "x", "a": 7}}]));
        let mut map = MapBuilder::new(None, StringBuilder::new(), arrow::array::Int64Builder::new());
        map.keys().append_value("k");
        map.values().append_value(1);
        map.append(true).unwrap();
        map.append(false).unwrap();
        check(map.finish(), json!([{"k": 1}, null]));
    }

    #[test]
    fn what_is_not_read() {
        let binary = DataType::Binary;
        assert_eq!(unreadable(&binary), Some(&binary));
        let list = DataType::List(Arc::new(Field::new("item", DataType::Binary, true)));
        assert_eq!(unreadable(&list), Some(&DataType::Binary));
        let deep = (0..200).fold(DataType::Utf8, |inner, _| DataType::List(Arc::new(Field::new("item", inner, true))));
        assert!(unreadable(&deep).is_some());
    }
}
