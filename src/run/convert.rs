//! `mlxbatch convert`: a model of another format into one that can be run.

use anyhow::Result;
use bytesize::ByteSize;

use super::{Status, print};
use crate::{
    args,
    model::{self, ctranslate2},
};

pub fn convert(args: &args::Convert) -> Result<Status> {
    let converted = ctranslate2::convert(&args.source, &args.out)?;
    let out = args.out.display();
    let mut text = format!("{out}: {} tensors, {}\n", converted.tensors, ByteSize(converted.bytes));
    if !converted.tokenizer {
        // What is missing, and where there is one, as the run would say it.
        let files = model::locate(&args.out.to_string_lossy())?;
        if let Err(error) = files.side_file("tokenizer.json") {
            text.push_str(&format!("note: {error}\n"));
        }
    }
    print(&text)?;
    Ok(Status::Ok)
}
