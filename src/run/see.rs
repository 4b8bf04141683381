//! Rows with images or recordings in their prompts, on their way to the engine: decoded on the rayon pool, in order.
//!
//! A thread of its own hands a bounded number of media to the pool ahead of the engine, so that what waits in memory does not
//! depend on how many rows a manifest has; a row's own media are decoded together. Rows leave in the order in which they came.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    },
    thread,
    time::Instant,
};

use anyhow::{Result, anyhow};
use rayon::prelude::*;

use super::{
    feed::{Fed, Feed, Next, Pending, Perceived, Total, Work},
    hear::{quiet_decoders, quietly},
};
use crate::{
    manifest::MediumKind,
    media::panic_words,
    prompt::{Prompter, Sensed, Senses},
    schedule::Request,
    sink::{Outcome, Stage},
};

/// Media decoded or under way, beyond those of the first row: about 2.6 MB each for an image of 280 tokens.
const MEDIA_AHEAD: usize = 32;

/// Rows under way at once, with media or without.
const ROWS_AHEAD: usize = 256;

/// Rows that wait for the loop.
const ROWS_READY: usize = 4;

pub struct See {
    rows: Receiver<Result<Seen>>,
    total: Option<Total>,
}

enum Seen {
    Row(Fed),
    End(Total),
}

/// A row under way, with how many media it holds.
enum Underway {
    Ready(Fed),
    Decoding { media: usize, done: Receiver<Fed> },
}

impl See {
    pub fn start(feed: Feed, prompter: Arc<Prompter>, senses: Senses) -> Self {
        quiet_decoders();
        let (sender, rows) = sync_channel(ROWS_READY);
        thread::spawn(move || {
            if let Err(error) = see(feed, &prompter, &Arc::new(senses), &sender) {
                // The loop has gone where nobody receives it.
                let _ = sender.send(Err(error));
            }
        });
        Self { rows, total: None }
    }

    /// The next row. With `wait` it is never [`Next::NotYet`].
    pub fn next(&mut self, wait: bool) -> Result<Next> {
        if self.total.is_some() {
            return Ok(Next::End);
        }
        let seen = if wait {
            self.rows.recv().ok()
        } else {
            match self.rows.try_recv() {
                Err(TryRecvError::Empty) => return Ok(Next::NotYet),
                received => received.ok(),
            }
        };
        match seen.ok_or_else(|| anyhow!("the thread that has media decoded ended without a word"))?? {
            Seen::Row(fed) => Ok(Next::Row(fed)),
            Seen::End(total) => {
                self.total = Some(total);
                Ok(Next::End)
            }
        }
    }

    /// Known after the last row.
    pub fn total(&self) -> Option<Total> {
        self.total
    }
}

fn see(mut feed: Feed, prompter: &Arc<Prompter>, senses: &Arc<Senses>, out: &SyncSender<Result<Seen>>) -> Result<()> {
    let mut underway: VecDeque<Underway> = VecDeque::new();
    let mut ahead = 0;
    let mut exhausted = false;
    loop {
        // The first row under way always goes on, whatever it holds.
        while !exhausted && (underway.is_empty() || (ahead < MEDIA_AHEAD && underway.len() < ROWS_AHEAD)) {
            match feed.next(underway.is_empty())? {
                Next::Row(fed) => {
                    let row = start(fed, prompter, senses);
                    if let Underway::Decoding { media, .. } = &row {
                        ahead += media;
                    }
                    underway.push_back(row);
                }
                Next::NotYet => break,
                Next::End => exhausted = true,
            }
        }
        let fed = match underway.pop_front() {
            Some(Underway::Ready(fed)) => fed,
            Some(Underway::Decoding { media, done }) => {
                ahead -= media;
                done.recv().map_err(|_| anyhow!("the pool that decodes media ended without a word"))?
            }
            None => {
                let Some(total) = feed.total() else { continue };
                let _ = out.send(Ok(Seen::End(total)));
                return Ok(());
            }
        };
        if out.send(Ok(Seen::Row(fed))).is_err() {
            return Ok(());
        }
    }
}

fn start(fed: Fed, prompter: &Arc<Prompter>, senses: &Arc<Senses>) -> Underway {
    let media = match &fed {
        Fed::Ready(pending) => match &pending.work {
            Work::Media { media, .. } => media.len(),
            Work::Text(_) | Work::Speech { .. } => 0,
        },
        Fed::Failed(_) => 0,
    };
    let Fed::Ready(pending) = fed else { return Underway::Ready(fed) };
    if media == 0 {
        return Underway::Ready(Fed::Ready(pending));
    }
    let (sender, done) = sync_channel(1);
    let (prompter, senses) = (Arc::clone(prompter), Arc::clone(senses));
    rayon::spawn(move || {
        // The loop has gone where nobody receives it.
        let _ = sender.send(decoded(*pending, &prompter, &senses));
    });
    Underway::Decoding { media, done }
}

/// A row whose media are in its request; or failed, with the first of them that cannot be used.
fn decoded(mut pending: Pending, prompter: &Prompter, senses: &Senses) -> Fed {
    match complete(&pending.work, prompter, senses) {
        Ok((request, perceived)) => {
            pending.work = Work::Text(Arc::new(request));
            pending.perceived = perceived;
            Fed::Ready(Box::new(pending))
        }
        Err(error) => Fed::Failed(Box::new(pending.into_row(Outcome::Failed { stage: Stage::Media, error }))),
    }
}

fn complete(work: &Work, prompter: &Prompter, senses: &Senses) -> Result<(Request, Perceived), String> {
    let started = Instant::now();
    let Work::Media { request, media } = work else { return Err("the row holds no media".to_owned()) };
    let sense = |medium| {
        let sensed = quietly(|| catch_unwind(AssertUnwindSafe(|| senses.sense(medium))));
        sensed.unwrap_or_else(|panic| {
            Err(format!("the decoder failed on a file ({}): convert it, for example to PNG or FLAC", panic_words(&*panic)))
        })
    };
    let sensed: Vec<Sensed> = media.par_iter().map(sense).collect::<Result<_, String>>()?;
    let request = prompter.complete(request.clone(), &sensed)?;
    Ok((request, Perceived { took: started.elapsed(), ..perceived(sensed) }))
}

/// Of all media of a row together; where it has several recordings, a note says which it is of.
fn perceived(sensed: Vec<Sensed>) -> Perceived {
    let of_kind = |kind| sensed.iter().filter(move |medium| medium.kind == kind);
    let recordings = of_kind(MediumKind::Audio).count();
    let heard = of_kind(MediumKind::Audio).map(|medium| (medium.soft_tokens, medium.seconds));
    let mut perceived = Perceived {
        image_tokens: of_kind(MediumKind::Image).map(|medium| medium.soft_tokens).sum(),
        heard: heard.reduce(|sum, one| (sum.0 + one.0, sum.1 + one.1)),
        ..Perceived::default()
    };
    let sounds = sensed.into_iter().filter(|medium| medium.kind == MediumKind::Audio);
    for (place, medium) in sounds.enumerate() {
        let of_which = |note| if recordings > 1 { format!("recording {}: {note}", place + 1) } else { note };
        perceived.notes.extend(medium.notes.into_iter().map(of_which));
    }
    perceived
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{media::Patches, schedule::MediumContent};

    fn sensed(kind: MediumKind, soft_tokens: u32, seconds: f64, notes: &[&str]) -> Sensed {
        let content = Arc::new(MediumContent::Image(Patches { columns: 3, rows: 3, soft_tokens: 1, values: Vec::new() }));
        let notes = notes.iter().map(|note| (*note).to_owned()).collect();
        Sensed { content, soft_tokens, identity: 1, kind, seconds, notes }
    }

    #[test]
    fn media_of_a_row_are_summed_and_notes_say_of_which_recording() {
        use MediumKind::{Audio, Image};
        let row = perceived(vec![
            sensed(Image, 9, 0.0, &[]),
            sensed(Audio, 25, 1.0, &["cut off"]),
            sensed(Image, 4, 0.0, &[]),
            sensed(Audio, 50, 2.0, &["ends early", "cut off"]),
        ]);
        assert_eq!((row.image_tokens, row.heard), (13, Some((75, 3.0))));
        assert_eq!(row.notes, ["recording 1: cut off", "recording 2: ends early", "recording 2: cut off"]);
        let row = perceived(vec![sensed(Audio, 25, 1.0, &["cut off"]), sensed(Image, 9, 0.0, &[])]);
        assert_eq!((row.image_tokens, row.heard, &*row.notes), (9, Some((25, 1.0)), &["cut off".to_owned()][..]));
        assert_eq!(perceived(vec![sensed(Image, 9, 0.0, &[])]).heard, None);
    }
}
