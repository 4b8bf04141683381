//! Against Pillow and the reference's processor: goldens/image/, by fixtures/image_goldens.py.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{PatchRule, Patches, Picture};
use crate::media::MediaSource;

fn below(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)
}

fn picture(path: PathBuf) -> Picture {
    Picture::open(&MediaSource::File(path.clone())).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn cases() -> Value {
    serde_json::from_str(&fs::read_to_string(below("goldens/image/cases.json")).unwrap()).unwrap()
}

fn rule([patch_size, pooling_kernel_size, soft_tokens_max]: [u32; 3]) -> PatchRule {
    PatchRule { patch_size, pooling_kernel_size, soft_tokens_max, ..PatchRule::default() }
}

fn numbers<const N: usize>(value: &Value) -> [u32; N] {
    let numbers: Vec<u32> = value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as u32).collect();
    numbers.try_into().unwrap()
}

#[test]
fn every_format_is_decoded_as_pillow_does() {
    let mut names: Vec<String> =
        fs::read_dir(below("fixtures/images")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() >= 38, "{names:?}");
    for name in names {
        let ours = picture(below("fixtures/images").join(&name));
        let theirs = picture(below("goldens/image").join(format!("{name}.png")));
        assert_eq!((ours.width, ours.height), (theirs.width, theirs.height), "{name}");
        let far = ours.pixels.iter().zip(&theirs.pixels).map(|(a, b)| a.abs_diff(*b));
        let (most, sum) = far.fold((0, 0), |(most, sum), far| (most.max(far), sum + u64::from(far)));
        // Decoders of lossy formats may round as they like; half a step on average they do not get away from each other.
        let allowed = match name.rsplit_once('.') {
            Some((_, "jpg")) => 8,
            Some(("lossy", "webp")) => 8,
            _ => 0,
        };
        let mean = sum as f64 / ours.pixels.len() as f64;
        println!("{name}: most {most}, mean {mean:.3}");
        assert!(most <= allowed && mean < 0.75, "{name}: {most} off at most, {mean} on average");
    }
}

#[test]
fn patches_are_the_references_to_the_bit() {
    let cases = cases();
    let values: [u32; 256] = numbers(&cases["values"]);
    for case in cases["cases"].as_array().unwrap() {
        let name = case["image"].as_str().unwrap();
        let [patch_size, ..] = numbers::<3>(&case["rule"]);
        let patches = rule(numbers(&case["rule"])).patches(picture(below("fixtures/images").join(name))).unwrap();
        let expected = ["columns", "rows", "soft_tokens"].map(|key| case[key].as_u64().unwrap() as u32);
        assert_eq!([patches.columns, patches.rows, patches.soft_tokens], expected, "{case}");
        let theirs = picture(below("goldens/image").join(case["patches"].as_str().unwrap()));
        assert_eq!((theirs.width, theirs.height), (patch_size.pow(2), patches.columns * patches.rows));
        let theirs: Vec<u32> = theirs.pixels.iter().map(|value| values[usize::from(*value)]).collect();
        let ours: Vec<u32> = patches.values.iter().map(|value| value.to_bits()).collect();
        assert!(ours == theirs, "{case}: {} of {} differ", ours.iter().zip(&theirs).filter(|(a, b)| a != b).count(), ours.len());
    }
}

#[test]
fn sizes_are_the_references() {
    for case in cases()["sizes"].as_array().unwrap() {
        let [width, height, scaled_width, scaled_height] = numbers(case);
        for rule in [PatchRule::default(), PatchRule::default().of_whole_tokens()] {
            assert_eq!(rule.size(width, height).unwrap(), (scaled_width, scaled_height), "{width} × {height}, {rule:?}");
        }
    }
}

/// The image that patches were cut of, row by row.
fn whole(patches: &Patches, side: usize) -> Vec<u32> {
    let (columns, rows) = (patches.columns as usize, patches.rows as usize);
    let pixel = |y: usize, x: usize| {
        let patch = y / side * columns + x / side;
        let first = 3 * (patch * side * side + y % side * side + x % side);
        patches.values[first..first + 3].iter().map(|value| value.to_bits())
    };
    (0..rows * side).flat_map(|y| (0..columns * side).flat_map(move |x| pixel(y, x))).collect()
}

#[test]
fn patches_of_whole_tokens_are_the_same_pixels() {
    let cases = cases();
    for case in cases["cases"].as_array().unwrap() {
        let picture = || picture(below("fixtures/images").join(case["image"].as_str().unwrap()));
        let rule = rule(numbers(&case["rule"]));
        let (parted, whole_tokens) = (rule.patches(picture()).unwrap(), rule.of_whole_tokens().patches(picture()).unwrap());
        let kernel = rule.pooling_kernel_size;
        assert_eq!([whole_tokens.columns, whole_tokens.rows].map(|patches| patches * kernel), [parted.columns, parted.rows]);
        assert_eq!((whole_tokens.soft_tokens, whole_tokens.columns * whole_tokens.rows), (parted.soft_tokens, parted.soft_tokens));
        let side = rule.patch_size as usize;
        assert!(whole(&whole_tokens, side * kernel as usize) == whole(&parted, side), "{case}");
    }
}

#[test]
fn another_filter_or_order_is_seen() {
    let golden = picture(below("goldens/image/rgb8.png.patches0.png")).pixels;
    let patches = rule([4, 2, 70]).patches(picture(below("fixtures/images/rgb8.png"))).unwrap();
    let ours: Vec<u8> = patches.values.iter().map(|value| (value * 255.0).round() as u8).collect();
    assert!(ours == golden);
    // Columns before rows.
    let turned: Vec<u8> =
        (0..48).map(|at| (at / 12, at % 12 / 3, at % 3)).map(|(y, x, colour)| ours[12 * x + 3 * y + colour]).collect();
    assert!(turned[..] != golden[..48]);
}
