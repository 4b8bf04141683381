//! Reading parts that are closed.

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
};

use arrow::{array::RecordBatch, error::ArrowError};
use fs_err::File;
use parquet::{
    arrow::{
        ProjectionMask,
        arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder},
    },
    errors::ParquetError,
};
use thiserror::Error;

use super::files::Listing;

/// Rows read at a time.
const BATCH_ROWS: usize = 8192;

/// A part that cannot be read.
#[derive(Debug, Error)]
pub enum PartError {
    #[error("failed to read {folder}")]
    Folder { folder: PathBuf, source: io::Error },
    #[error("failed to open {file}")]
    Open { file: PathBuf, source: io::Error },
    #[error("{file} is damaged, or no Parquet file")]
    Damaged { file: PathBuf, source: ParquetError },
    #[error("{file} is damaged from row {row} of the file on")]
    DamagedRows { file: PathBuf, row: usize, source: ArrowError },
    #[error("{file} has no column `{column}` of type {expected}, so it is no part of mlxbatch's, or of another version")]
    Column { file: PathBuf, column: String, expected: &'static str },
}

/// The parts of a results folder, in order; none when it has none.
pub fn part_files(folder: &Path) -> Result<Vec<PathBuf>, PartError> {
    let listing = Listing::read(folder).map_err(|source| PartError::Folder { folder: folder.into(), source })?;
    Ok(listing.parts.into_iter().map(|part| folder.join(super::files::part_name(part))).collect())
}

/// A part's footer, and the file to read columns from.
pub struct ClosedPart {
    pub path: PathBuf,
    file: std::fs::File,
    footer: ArrowReaderMetadata,
}

impl ClosedPart {
    pub fn open(path: &Path) -> Result<Self, PartError> {
        let file = File::open(path).map_err(|source| PartError::Open { file: path.into(), source })?.into_file();
        let footer = ArrowReaderMetadata::load(&file, ArrowReaderOptions::new())
            .map_err(|source| PartError::Damaged { file: path.into(), source })?;
        Ok(ClosedPart { path: path.into(), file, footer })
    }

    pub fn rows(&self) -> u64 {
        self.footer.metadata().file_metadata().num_rows().max(0) as u64
    }

    pub fn schema(&self) -> &arrow::datatypes::Schema {
        self.footer.schema()
    }

    /// The file's own metadata, by key.
    pub fn metadata(&self) -> HashMap<&str, &str> {
        let pairs = self.footer.metadata().file_metadata().key_value_metadata();
        pairs.into_iter().flatten().filter_map(|pair| Some((pair.key.as_str(), pair.value.as_deref()?))).collect()
    }

    /// Whether a column of no nested type has a value that is not null; true where the file does not say.
    pub fn has_values(&self, column: &str) -> bool {
        let empty = self.footer.metadata().row_groups().iter().all(|group| {
            let chunk = group.columns().iter().find(|chunk| chunk.column_path().parts() == [column]);
            let nulls = chunk.and_then(|chunk| chunk.statistics()?.null_count_opt());
            nulls.is_some_and(|nulls| nulls == group.num_rows().max(0) as u64)
        });
        !empty
    }

    /// Reads the named columns, or all for none named, a batch at a time; batches have them in the file's order.
    pub fn read(&self, columns: &[&str]) -> Result<Batches, PartError> {
        let damaged = |source| PartError::Damaged { file: self.path.clone(), source };
        let file = self.file.try_clone().map_err(|source| PartError::Open { file: self.path.clone(), source })?;
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.footer.clone());
        let mask = match columns {
            [] => ProjectionMask::all(),
            named => ProjectionMask::columns(builder.parquet_schema(), named.iter().copied()),
        };
        let reader = builder.with_projection(mask).with_batch_size(BATCH_ROWS).build().map_err(damaged)?;
        Ok(Batches { path: self.path.clone(), reader, rows: 0 })
    }

    /// The error for a column that is not there as it should be.
    pub fn no_column(&self, column: &str, expected: &'static str) -> PartError {
        PartError::Column { file: self.path.clone(), column: column.into(), expected }
    }
}

pub struct Batches {
    path: PathBuf,
    reader: ParquetRecordBatchReader,
    rows: usize,
}

impl Iterator for Batches {
    type Item = Result<RecordBatch, PartError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.reader.next()?;
        let (file, row) = (self.path.clone(), self.rows);
        self.rows += batch.as_ref().map_or(0, RecordBatch::num_rows);
        Some(batch.map_err(|source| PartError::DamagedRows { file, row, source }))
    }
}
