//! The allow-list as written: groups of calls with a reason each, and rules on arguments.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::Deserialize;
use syscalls::x86_64::Sysno;

use crate::Error;

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    architecture: String,
    default: String,
    unknown: String,
    #[serde(default)]
    allow: Vec<Group>,
    #[serde(default)]
    refuse: Vec<Refusal>,
    #[serde(default)]
    rule: Vec<WrittenRule>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    reason: String,
    calls: Vec<String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Refusal {
    reason: String,
    calls: Vec<String>,
    errno: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Masked {
    pub mask: u32,
    pub value: u32,
}

/// For one value of a rule's argument, which other argument decides, and with which values the call is allowed.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Then {
    pub value: u32,
    pub argument: u8,
    pub allow_values: Vec<u32>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenRule {
    reason: String,
    call: String,
    argument: u8,
    #[serde(default)]
    allow_values: Vec<u32>,
    #[serde(default)]
    refuse_values: Vec<u32>,
    #[serde(default)]
    refuse_masked: Vec<Masked>,
    #[serde(default)]
    refuse_bits: u32,
    #[serde(default)]
    then: Option<Then>,
    #[serde(default)]
    otherwise: Option<String>,
    errno: String,
}

/// What is done with one call. Rules look at the low 32 bits of an argument, which is all that the kernel reads of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rule {
    Allow,
    Refuse(u16),
    Judge {
        argument: u8,
        allow_values: Vec<u32>,
        refuse_values: Vec<u32>,
        refuse_masked: Vec<Masked>,
        refuse_bits: u32,
        then: Option<Then>,
        refuse_others: bool,
        errno: u16,
    },
}

/// The list, by call number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List {
    pub rules: BTreeMap<u32, Rule>,
    pub default: u16,
    pub unknown: u16,
}

impl List {
    /// # Errors
    /// As `compile`.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let written: Written = toml::from_str(text).map_err(|error| Error::Syntax(error.message().to_owned()))?;
        if written.architecture != "x86_64" {
            return Err(Error::Architecture(written.architecture));
        }
        let (default, unknown) = (errno(&written.default)?, errno(&written.unknown)?);
        let mut list = Self {
            rules: BTreeMap::new(),
            default,
            unknown,
        };
        for group in written.allow {
            for call in group.calls {
                list.put(&call, &group.reason, Rule::Allow)?;
            }
        }
        for group in written.refuse {
            let errno = errno(&group.errno)?;
            for call in group.calls {
                list.put(&call, &group.reason, Rule::Refuse(errno))?;
            }
        }
        for rule in written.rule {
            list.put(&rule.call.clone(), &rule.reason.clone(), judge(rule)?)?;
        }
        Ok(list)
    }

    fn put(&mut self, call: &str, reason: &str, rule: Rule) -> Result<(), Error> {
        if reason.trim().is_empty() {
            return Err(Error::NoReason(call.to_owned()));
        }
        let number = Sysno::from_str(call).map_err(|_| Error::UnknownCall(call.to_owned()))?;
        match self.rules.insert(number.id().unsigned_abs(), rule) {
            None => Ok(()),
            Some(_) => Err(Error::Twice(call.to_owned())),
        }
    }
}

fn judge(rule: WrittenRule) -> Result<Rule, Error> {
    if rule.argument > 5 || rule.then.as_ref().is_some_and(|then| then.argument > 5) {
        return Err(Error::Rule(rule.call, "a call has arguments 0 to 5"));
    }
    let refuse_others = match rule.otherwise.as_deref() {
        None => false,
        Some("refuse") => true,
        Some(_) => return Err(Error::Rule(rule.call, "otherwise is \"refuse\" or left out")),
    };
    if rule.refuse_masked.iter().any(|masked| masked.value & !masked.mask != 0) {
        return Err(Error::Rule(rule.call, "a masked value has bits outside its mask"));
    }
    Ok(Rule::Judge {
        argument: rule.argument,
        allow_values: rule.allow_values,
        refuse_values: rule.refuse_values,
        refuse_masked: rule.refuse_masked,
        refuse_bits: rule.refuse_bits,
        then: rule.then,
        refuse_others,
        errno: errno(&rule.errno)?,
    })
}

fn errno(name: &str) -> Result<u16, Error> {
    match name {
        "EPERM" => Ok(1),
        "EACCES" => Ok(13),
        "EINVAL" => Ok(22),
        "ENOSYS" => Ok(38),
        "EAFNOSUPPORT" => Ok(97),
        _ => Err(Error::UnknownErrno(name.to_owned())),
    }
}
