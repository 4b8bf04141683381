//! Media into a prompt: each placeholder that the chat template wrote becomes `begin`, a placeholder for each soft token, `end`.
//!
//! Source: `Gemma4Processor.__call__` in mlx-vlm's `processing_gemma4.py`, which does so in the text: the k-th placeholder of a
//! kind is the k-th medium of that kind, and what is written for it is not looked at again. All of these are tokens of their own,
//! so ids give the same.

use crate::manifest::MediumKind;
use crate::model::{Placeholder, Towers};

/// A medium's place: its index among the row's media, and where its soft tokens begin in the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spliced {
    pub medium: usize,
    pub first: u32,
}

/// The whole prompt, and its media in the order of the prompt.
///
/// `media` has for each medium its kind and its soft tokens. The error is a sentence.
pub fn splice(prompt: &[u32], towers: &Towers, media: &[(MediumKind, u32)]) -> Result<(Vec<u32>, Vec<Spliced>), String> {
    let image = towers.image.as_ref().map(|tower| tower.placeholder);
    let audio = towers.audio.as_ref().map(|tower| tower.placeholder);
    let of_kind = |kind: MediumKind| media.iter().enumerate().filter(move |(_, (own, _))| *own == kind);
    check_places(prompt, towers, media.iter().map(|(kind, _)| *kind))?;
    let (mut images, mut sounds) = (of_kind(MediumKind::Image), of_kind(MediumKind::Audio));
    let soft_tokens: usize = media.iter().map(|(_, tokens)| *tokens as usize).sum();
    let mut spliced = Vec::with_capacity(prompt.len() + 2 * media.len() + soft_tokens);
    let mut places = Vec::with_capacity(media.len());
    for &token in prompt {
        let next = if image.is_some_and(|placeholder| placeholder.token == token) {
            image.zip(images.next())
        } else if audio.is_some_and(|placeholder| placeholder.token == token) {
            audio.zip(sounds.next())
        } else {
            None
        };
        let Some((placeholder, (medium, &(_, tokens)))) = next else {
            spliced.push(token);
            continue;
        };
        spliced.push(placeholder.begin);
        places.push(Spliced { medium, first: u32::try_from(spliced.len()).unwrap_or(u32::MAX) });
        spliced.resize(spliced.len() + tokens as usize, placeholder.token);
        spliced.push(placeholder.end);
    }
    Ok((spliced, places))
}

/// Whether `prompt` has as many placeholders of each kind as there are `media`. The error is a sentence.
pub fn check_places(prompt: &[u32], towers: &Towers, media: impl Iterator<Item = MediumKind> + Clone) -> Result<(), String> {
    let count = |kind: MediumKind| media.clone().filter(|own| *own == kind).count();
    let image = towers.image.as_ref().map(|tower| tower.placeholder);
    let audio = towers.audio.as_ref().map(|tower| tower.placeholder);
    check(prompt, MediumKind::Image, image, count(MediumKind::Image))?;
    check(prompt, MediumKind::Audio, audio, count(MediumKind::Audio))
}

fn check(prompt: &[u32], kind: MediumKind, placeholder: Option<Placeholder>, media: usize) -> Result<(), String> {
    let places = placeholder.map_or(0, |placeholder| prompt.iter().filter(|token| **token == placeholder.token).count());
    if places == media {
        return Ok(());
    }
    let name = match kind {
        MediumKind::Image => "images",
        MediumKind::Audio => "recordings",
    };
    Err(format!(
        "the prompt has {places} places for {name}, and the row has {media}: the model's chat template, or prompt.template, must write \
         each of them once"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::PatchRule;
    use crate::model::{AudioTower, ImageTower};

    fn towers() -> Towers {
        let placeholder = |token| Placeholder { token, begin: token + 1, end: token + 2 };
        Towers {
            image: Some(ImageTower { placeholder: placeholder(100), rule: PatchRule::default(), both_ways: false }),
            audio: Some(AudioTower { placeholder: placeholder(200), soft_tokens_max: 750, samples_per_token: None }),
        }
    }

    #[test]
    fn placeholders_become_spans_in_the_order_of_the_prompt() {
        use MediumKind::{Audio, Image};
        let media = [(Image, 2), (Image, 1), (Audio, 3)];
        let (prompt, places) = splice(&[1, 200, 2, 100, 100, 3], &towers(), &media).unwrap();
        assert_eq!(prompt, [1, 201, 200, 200, 200, 202, 2, 101, 100, 100, 102, 101, 100, 102, 3]);
        let place = |medium, first| Spliced { medium, first };
        assert_eq!(places, [place(2, 2), place(0, 8), place(1, 12)]);
        assert_eq!(splice(&[1, 2], &towers(), &[]).unwrap(), (vec![1, 2], vec![]));
    }

    #[test]
    fn places_and_media_must_match() {
        let error = splice(&[1, 100, 2], &towers(), &[]).unwrap_err();
        assert!(error.contains("1 places for images, and the row has 0"), "{error}");
        let error = splice(&[1, 100], &towers(), &[(MediumKind::Image, 2), (MediumKind::Audio, 1)]).unwrap_err();
        assert!(error.contains("0 places for recordings, and the row has 1"), "{error}");
        let error = splice(&[1, 100], &Towers::default(), &[(MediumKind::Image, 2)]).unwrap_err();
        assert!(error.contains("0 places for images"), "{error}");
    }
}
